"""Engines that share experts on two GPUs: with recorded decoding, without, and each with all."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.gpu.recipes.runs import new_run, proof, together, without_push, write_model
from tests.gpu.recipes.test_settings import MIXTURE
from tests.system.kill_resume import Outcome, Run, differences

pytestmark = pytest.mark.timeout(400)

SHARED = ["grpo", "--nproc=2", "--split.infer.ep=2"]
WAYS = {
    "all experts each": ["grpo", "--nproc=2"],
    "recorded": SHARED,
    "recorded, few pages": [*SHARED, "--engine.num_pages=24"],
    "eager": [*SHARED, "--engine.cuda_graphs=false"],
}


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[Run, Outcome]]:
    model = f"--model={write_model(folder / 'experts', **MIXTURE)}"
    found = {
        way: new_run(folder, f"w{n}", words, model) for n, (way, words) in enumerate(WAYS.items())
    }
    ended = together({way: run.finish for way, run in found.items()})
    return {way: (run, ended[way]) for way, run in found.items()}


@pytest.mark.parametrize("way", WAYS)
def test_runs_are_those_of_engines_with_all_experts(
    runs: dict[str, tuple[Run, Outcome]], way: str
) -> None:
    run, outcome = runs[way]
    assert broken_promises(run.folder) == []
    for compared, mismatched in proof(run):
        assert compared > 1000
        assert mismatched == 0
    assert differences(without_push(outcome), without_push(runs["all experts each"][1])) == []
