"""An asynchronous run that is killed at random moments loses no prompt, and repeats none.

`python -m tests.system.kill_sampler` is the long form.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.types.samples import Sample
from tests.system.kill_sampler import Account, campaign

NUM_KILLS = 5


@pytest.mark.system
@pytest.mark.timeout(3000)
def test_no_prompt_is_lost_or_repeated(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED") or random.SystemRandom().randrange(10**6))
    print(f"KILL_SEED={seed}")
    num_killed, accounts, problems = campaign(tmp_path, NUM_KILLS, seed)
    assert problems == []
    assert num_killed >= NUM_KILLS
    assert sum(len(account.restored) for account in accounts) > 0


def sample(uid: int, tokens: list[int]) -> Sample:
    ids = np.array(tokens, np.int32)
    return Sample(uid, 0, ids, ids.astype(np.float32), np.zeros_like(ids), "completed")


GOOD = Account(
    steps=[[0, 1, 3, 4], [5, 6, 7, 8]],
    num_drawn=12,
    num_rejected=1,
    waiting=[9, 10, 11],
    samples={(5, 0): sample(5, [1, 2, 3])},
    held=[sample(5, [1, 2]), sample(11, [7])],
)


@pytest.mark.parametrize(
    ("account", "problem"),
    [
        (GOOD, ""),
        (replace(GOOD, steps=[[0, 1, 3, 4], [5, 6, 7]], num_drawn=11), "learned from [4, 3]"),
        (replace(GOOD, steps=[[0, 1, 3, 5], [4, 6, 7, 8]]), "prompts are out of order"),
        (replace(GOOD, waiting=[8, 9, 10, 11]), "1 prompts were repeated"),
        (replace(GOOD, num_rejected=0), "1 prompts were lost"),
        (replace(GOOD, held=[sample(5, [1, 4])]), "1 buffered samples were drawn anew"),
    ],
)
def test_what_is_wrong_is_seen(account: Account, problem: str) -> None:
    found = list(account.problems())
    assert len(found) == bool(problem)
    assert all(problem in one for one in found)
