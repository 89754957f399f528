"""Prompts and samples for tests of hooks, and a loop around a pool."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, Event
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

HERE = Path(__file__).parent
HOOKS = str(HERE / "hook_functions.py")


class CharTokenizer:
    """A character a token, and a template that ends each turn with a line break."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[*map(ord, line)] for line in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        assert kwargs.pop("add_generation_prompt") is True
        turns = "".join(f"{turn['role']}: {turn['content']}\n" for turn in conversation)
        return turns + "assistant: "


def make_prompt(uid: int = 7, text: str = "37+48=") -> Prompt:
    return Prompt(uid, np.array([1, 2], np.int32), text=text, answer="85")


def make_sample(text: str = "84", index: int = 3, uid: int = 7) -> Sample:
    num = len(text)
    zeros = np.zeros(num, np.int32)
    return Sample(uid, index, zeros, np.zeros(num, np.float32), zeros, "completed", text=text)


def events_of(
    pool: HookPool,
    answer: Callable[[EngineCall], None] | None = None,
    until: Callable[[], bool] | None = None,
) -> dict[int, Event]:
    """Poll until nothing is unfinished, or until `until`; return the last event of each task."""
    last: dict[int, Event] = {}
    while pool.num_unfinished and not (until and until()):
        for event in pool.poll():
            if isinstance(event, EngineCall):
                assert answer is not None, "an engine call that nobody expects"
                answer(event)
            else:
                assert event.task_id not in last, "two events of one task"
                last[event.task_id] = event
        if pool.num_unfinished:
            select.select(pool.filenos(), [], [], 0.2)
    return last
