"""A run that goes on on another number of ranks, where a batch has a fixed number of parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.recipes.forked_run import ForkedRun
from tests.system.kill_resume import SMALL, differences

pytestmark = pytest.mark.dist

WORDS = ("grpo", *SMALL, "--steps=3", "--trainer.minibatches=2", "--trainer.deterministic=true")
FIXED = "--trainer.data_parts=2"


def test_two_ranks_then_one_end_with_the_weights_of_one(tmp_path: Path) -> None:
    whole = ForkedRun(tmp_path, [*WORDS, FIXED, "--nproc=1"], name="whole")
    expected = whole.finish()
    begun = ForkedRun(tmp_path, [*WORDS, FIXED, "--nproc=2", "--steps=1"], name="begun")
    first = begun.finish()
    resumed = ForkedRun(tmp_path, [*WORDS, FIXED, "--nproc=1"], name="begun")
    found = resumed.finish()
    assert "resuming at step 2 from " in resumed.output
    assert "bit for bit" not in resumed.output
    assert found.weights == expected.weights != first.weights
    assert found.samples == expected.samples
    norms = [[row["train/grad_norm"] for row in one.metrics] for one in (found, expected)]
    assert norms[0] == norms[1]
    assert len(set(norms[0])) > 1, differences(expected, found)
