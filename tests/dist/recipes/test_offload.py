"""A run whose trainer keeps moments and master weights in host memory has the bits of one that has
them on the device, whether its roles sleep or not, and goes on from its checkpoint.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.recipes.conftest import Ended, run_in
from tests.dist.recipes.test_loops import EVEN, check_proof, drawn
from tests.dist.recipes.test_sleep import ALWAYS, NEVER, exported

pytestmark = pytest.mark.dist

MASTER = "--trainer.backend.offload=master"
WORDS = ("--steps=3", "--run.save_every=1", f"--reward={EVEN}")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A run that keeps all on the device."""
    ended = run_in(tmp_path_factory.mktemp("plain"), "grpo", *WORDS, NEVER)
    assert ended.code == 0, ended.sentence
    return ended


@pytest.mark.parametrize("sleep", [ALWAYS, NEVER])
def test_grpo_has_the_same_weights(run: Any, plain: Ended, sleep: str) -> None:
    offloading = run("grpo", *WORDS, MASTER, sleep)
    check_proof(offloading, 3)
    assert drawn(offloading, 3) == drawn(plain, 3)
    assert exported(offloading) == exported(plain) != {}


def test_a_run_goes_on_with_its_moments_elsewhere(run: Any, plain: Ended) -> None:
    first = run("grpo", *WORDS[1:], "--steps=2", MASTER, ALWAYS)
    again = run("grpo", *WORDS, NEVER, "--run.resume=true")
    assert first.code == again.code == 0, again.sentence
    assert "resuming at step 3" in again.output
    assert exported(again) == exported(plain) != {}
