"""No token is unequal in runs on a GPU with weights, keys and values in few bits. One flipped code
is found at a push, and makes tokens unequal where pushes are not compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grpo_proof import broken_promises
from tests.dist.recipes.test_features import CACHE, CODES, CODES_OF_4_BITS
from tests.gpu.recipes.flipped_code import FLIPPED
from tests.gpu.recipes.runs import ONE_GPU, new_run, proof, together, write_model
from tests.gpu.recipes.test_settings import MIXTURE
from tests.system.kill_resume import Run

pytestmark = pytest.mark.timeout(400)

FORMATS = {
    "weights in 8 bits": CODES,
    "weights in 4 bits": CODES_OF_4_BITS,
    "a cache in 8 bits": CACHE,
    "weights and cache in 8 bits": (*CODES, *CACHE),
    "weights in 4 bits, a cache in 8": (*CODES_OF_4_BITS, *CACHE),
    "adapters beside codes": (*CODES, *CACHE, "--trainer.lora.rank=8"),
}
EXPERTS = {"experts in 8 bits": (*CODES, *CACHE), "experts in 4 bits": CODES_OF_4_BITS}
UNSEEN = "a flipped code that no push compares"
FOUND = "a flipped code"


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    found = {
        what: new_run(folder, f"r{n}", ONE_GPU["sync"], *words)
        for n, (what, words) in enumerate(FORMATS.items())
    }
    mixture = f"--model={write_model(folder / 'experts', **MIXTURE)}"
    for n, (what, words) in enumerate(EXPERTS.items()):
        found[what] = new_run(folder, f"experts{n}", ONE_GPU["sync"], mixture, *words)
    planted = ["tests.gpu.recipes.flipped_code", "--nproc=1"]
    found[UNSEEN] = new_run(folder, "unseen", planted, *CODES, "--run.verify_every=0")
    found[FOUND] = new_run(folder, "found", planted, *CODES)
    codes = together({what: run.start for what, run in found.items()})
    ended = {found[what].name: code for what, code in codes.items()}
    assert ended == {run.name: int(what == FOUND) for what, run in found.items()}
    return found


@pytest.mark.parametrize("what", [*FORMATS, *EXPERTS])
def test_no_token_is_unequal(runs: dict[str, Run], what: str) -> None:
    for compared, mismatched in proof(runs[what]):
        assert compared > 1000
        assert mismatched == 0
    assert broken_promises(runs[what].folder) == []


def test_control_a_flipped_code_makes_tokens_unequal(runs: dict[str, Run]) -> None:
    for compared, mismatched in proof(runs[UNSEEN]):
        assert mismatched > 0.1 * compared


def test_a_push_finds_a_flipped_code(runs: dict[str, Run]) -> None:
    assert not (runs[FOUND].folder / "hf").exists()
    assert f"'{FLIPPED}'" in runs[FOUND].output
    assert "does not hold the bits" in runs[FOUND].output
