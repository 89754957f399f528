"""Every kind of fault once, each in a run of its own.

`python -m tests.system.chaos --seed` repeats the seed that is printed.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat

import pytest

from tests.system.chaos import play, play_and_print
from tests.system.chaos_cases import KINDS, Case, cases, draw

pytestmark = [pytest.mark.system, pytest.mark.timeout(3000)]

FAULTS = max(20, len(KINDS))
JOBS = 2


def test_every_fault_ends_in_its_sentence_or_does_not_matter() -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(10**6))
    print(f"CHAOS_SEED={seed}")
    with ThreadPoolExecutor(JOBS) as pool:
        outcomes = list(pool.map(play_and_print, repeat(seed), count(), cases(seed, FAULTS)))
    problems = [
        f"{seed}:{i} {o.case.kind} ({o.case.victim}): {o.problem}"
        for i, o in enumerate(outcomes)
        if o.problem
    ]
    assert problems == []
    assert {outcome.how for outcome in outcomes} >= {"error", "completed"}


def test_a_fault_that_nobody_foresaw_is_seen() -> None:
    """Negative control: a run that ends without the expected sentence is not accepted."""
    case = Case(
        "kill rank",
        "1",
        0.0,
        "words that no run says",
        signal=draw("kill rank", random.Random(0)).signal,
    )
    assert "no sentence says why" in play(case).problem


def test_a_seed_gives_the_same_faults_and_every_kind_comes() -> None:
    assert cases(3, 40) == cases(3, 40)
    assert cases(3, 40) != cases(4, 40)
    assert {case.kind for case in cases(3, len(KINDS))} == set(KINDS)
