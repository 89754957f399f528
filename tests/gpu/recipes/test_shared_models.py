"""Engines and trainers whose ranks share a model on GPUs: recorded or not, asleep in turn, killed,
and pushed to in the middle of answers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.gpu.recipes.runs import new_run, proof, together, without_push
from tests.shared_gpus import can_run
from tests.system.kill_resume import ROUNDS, Moment, Outcome, Run, differences

pytestmark = pytest.mark.timeout(400)

SHARED = ["grpo", "--nproc=2", "--split.infer.tp=2"]
TRAINED = ["grpo", "--nproc=2", "--split.train.tp=2"]
WAYS = {
    "recorded": SHARED,
    "recorded, few pages": [*SHARED, "--engine.num_pages=24"],
    "asleep": [*SHARED, "--offload.sleep=always"],
    "eager": [*SHARED, "--engine.cuda_graphs=false"],
    "trainer": TRAINED,
    "trainer and engine": [*TRAINED, "--split.infer.tp=2"],
}
if can_run(4):
    WAYS["four ranks"] = ["grpo", "--nproc=4", "--split.infer.tp=4"]
# ways that draw and learn the same
ALIKE = {
    "recorded": "eager",
    "recorded, few pages": "eager",
    "asleep": "eager",
    "trainer and engine": "trainer",
}
# a push comes while answers are under way, which go on with the new weights
PUSHED = [*SHARED, *ROUNDS, "--sampler.round_tokens=50"]


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, tuple[Run, Outcome]]:
    words = {**WAYS, "pushed": PUSHED, "pushed, eager": [*PUSHED, "--engine.cuda_graphs=false"]}
    found = {way: new_run(folder, f"w{n}", words[way]) for n, way in enumerate(words)}
    ended = together({way: run.finish for way, run in found.items()})
    return {way: (run, without_push(ended[way])) for way, run in found.items()}


@pytest.mark.parametrize("way", WAYS)
def test_no_token_has_other_bits(runs: dict[str, tuple[Run, Outcome]], way: str) -> None:
    run, _ = runs[way]
    assert broken_promises(run.folder) == []
    for compared, mismatched in proof(run):
        assert compared > 1000
        assert mismatched == 0


@pytest.mark.parametrize("way", ALIKE)
def test_ways_draw_and_learn_the_same(runs: dict[str, tuple[Run, Outcome]], way: str) -> None:
    assert differences(runs[way][1], runs[ALIKE[way]][1]) == []


def test_pushes_in_the_middle_of_answers(runs: dict[str, tuple[Run, Outcome]]) -> None:
    (_, recorded), (_, eager) = runs["pushed"], runs["pushed, eager"]
    assert differences(recorded, eager) == []
    assert recorded.weights != runs["recorded"][1].weights


def test_killed_and_gone_on_with(folder: Path, runs: dict[str, tuple[Run, Outcome]]) -> None:
    whole, outcome = runs["pushed"]
    run = new_run(folder, "killed", PUSHED)
    assert run.kill(Moment.random(random.Random(3), whole.num_events // 2)), run.output
    assert differences(outcome, without_push(run.finish())) == []
