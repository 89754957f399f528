"""Roles that sleep in turn on real gloo ranks: the bits are those of a run in which none sleeps.

Memory that sleeps holds no numbers there, so that a use of it would be seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.test_loops import check_proof, drawn

pytestmark = pytest.mark.dist

ALWAYS, NEVER = "--offload.sleep=always", "--offload.sleep=never"


def exported(ended: Any) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in Path(ended.folder / "hf").glob("*.safetensors")
    }


def same_run(run: Any, recipe: str, *words: str, nproc: int = 1, steps: int = 3) -> tuple[Any, Any]:
    """Run a recipe with sleep and without, and see that samples and weights have the same bits."""
    words = (f"--steps={steps}", *words)
    asleep = run(recipe, *words, ALWAYS, nproc=nproc, name="asleep")
    awake = run(recipe, *words, NEVER, nproc=nproc, name="awake")
    assert asleep.code == awake.code == 0, (asleep.sentence, awake.sentence)
    assert drawn(asleep, steps) == drawn(awake, steps)
    assert exported(asleep) == exported(awake) != {}
    return asleep, awake


@pytest.mark.parametrize("nproc", [1, 2])
def test_grpo_that_sleeps_has_the_same_weights(run: Any, nproc: int) -> None:
    asleep, awake = same_run(run, "grpo", nproc=nproc)
    check_proof(asleep, 3)
    assert "roles sleep in turn: offload.sleep = always" in asleep.output
    assert "nothing sleeps: offload.sleep = never" in awake.output
    assert all(row["time/sleep"] > 0 and row["time/wake"] > 0 for row in asleep.metrics)
    assert not any("time/sleep" in row for row in awake.metrics)
