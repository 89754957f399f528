"""Runs on one GPU whose roles sleep in turn end in the bits of runs in which nothing sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.recipes.runs import ONE_GPU, new_run, proof, together
from tests.system.kill_resume import differences

pytestmark = pytest.mark.timeout(400)

ALGORITHMS = {
    "grpo": (),
    "ppo": (
        "--algorithm=ppo",
        "--kl.coef=0.01",
        "--critic.init=random",
        "--critic.deterministic=true",
    ),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sleep_changes_no_bit(folder: Path, algorithm: str) -> None:
    """Also with a reference and a critic."""
    runs = {
        sleep: new_run(
            folder,
            f"{algorithm}-{sleep}",
            ONE_GPU["sync"],
            f"--offload.sleep={sleep}",
            *ALGORITHMS[algorithm],
        )
        for sleep in ("always", "never")
    }
    outcomes = together({name: run.finish for name, run in runs.items()})
    assert differences(outcomes["always"], outcomes["never"]) == []
    for compared, mismatched in proof(runs["always"]):
        assert compared > 0
        assert mismatched == 0
