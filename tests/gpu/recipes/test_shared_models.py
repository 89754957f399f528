"""Engines that share a model on GPUs: with recorded decoding, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.gpu.recipes.runs import new_run, proof, together
from tests.shared_gpus import can_run
from tests.system.kill_resume import Outcome, Run, differences

pytestmark = pytest.mark.timeout(400)

SHARED = ["grpo", "--nproc=2", "--split.infer.tp=2"]
WAYS = {
    "recorded": SHARED,
    "recorded, few pages": [*SHARED, "--engine.num_pages=24"],
    "eager": [*SHARED, "--engine.cuda_graphs=false"],
}
if can_run(4):
    WAYS["four ranks"] = ["grpo", "--nproc=4", "--split.infer.tp=4"]


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[Run, Outcome]]:
    found = {way: new_run(folder, f"w{n}", words) for n, (way, words) in enumerate(WAYS.items())}
    ended = together({way: run.finish for way, run in found.items()})
    return {way: (run, ended[way]) for way, run in found.items()}


@pytest.mark.parametrize("way", WAYS)
def test_no_token_has_other_bits(runs: dict[str, tuple[Run, Outcome]], way: str) -> None:
    run, outcome = runs[way]
    assert broken_promises(run.folder) == []
    for compared, mismatched in proof(run):
        assert compared > 1000
        assert mismatched == 0
    if way != "four ranks":  # which sums in other parts
        assert differences(outcome, runs["eager"][1]) == []
