"""Every grader in the pool that a run has, and hostile responses between good ones."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import Graded, SampleTask
from spmd_rl.rewards.names import BOXED, GRADERS, TEXT
from tests.unit.hooks.cases import events_of
from tests.unit.rewards.cases import ask, say

META: dict[str, Any] = {
    "choices": ["A", "B", "C"],
    "instruction_id_list": ["startend:end_checker", "detectable_format:json_format"],
    "kwargs": [{"end_phrase": "B"}, {}],
}
GOOD = {
    "dapo": "Answer: B",
    "deepscaler": r"</think>\boxed{B}",
    "math": r"\boxed{B}",
    "boxed_math": r"\boxed{B}",
    "ifeval": '"B',
}
HOSTILE = [
    "",
    "\0\ud7ff\U0010ffff",
    "1" * 1_000_000,
    "Answer:" * 100_000,
    "</think>" * 50_000,
    "<answer>" * 50_000,
    "<answer></answer" * 30_000,
    "\\boxed{" * 50_000,
    "{" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    "*" * 3_000,
    "<<" * 3_000,
    "(" * 100_000,
    " \n" * 3_000 + "x",
    "9" * 400 + "e99999999",
    "A " * 100_000,
]
NAMES = [name for name in GRADERS if GRADERS[name].rpartition(":")[2] == name]
# servers, one that has other instructions, and one that only an agent's episode has
NOT_HERE = "code", "remote", "judge", "ifbench", "environment"
RULES = [name for name in NAMES if name not in NOT_HERE]


def test_a_hostile_response_costs_its_own_sample_only() -> None:
    graders = [*RULES, *(BOXED + name for name in TEXT)]
    with HookPool(HookConfig(deadline_s=20.0, processes=1), graders) as pool:
        prompt = ask("B", **META)
        ids = [pool.submit(SampleTask(prompt, say(text), CallInfo())) for text in HOSTILE]
        events = events_of(pool)
    failed = [events[task] for task in ids if not isinstance(events[task], Graded)]
    assert failed == []


@pytest.mark.parametrize("name", RULES)
def test_a_good_response_is_graded_in_the_pool(name: str) -> None:
    with HookPool(HookConfig(deadline_s=60.0, processes=1), [name]) as pool:
        prompt = ask("B", **{**META, "instruction_id_list": META["instruction_id_list"][:1]})
        prompt = prompt.replace(meta=prompt.meta | {"kwargs": META["kwargs"][:1]})
        task = pool.submit(SampleTask(prompt, say(GOOD.get(name, "B")), CallInfo()))
        event = events_of(pool)[task]
    expected = 0.0 if name == "last_number" else 1.0
    assert event.grades[name][0].reward == expected
