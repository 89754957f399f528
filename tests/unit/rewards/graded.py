"""Calls of graders, in this process and through the pool of hooks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo, HookContext
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import SampleTask
from spmd_rl.rewards.names import GRADERS
from spmd_rl.rewards.remote import http
from spmd_rl.types.prompts import Prompt
from tests.unit.hooks.cases import events_of, make_sample

T = TypeVar("T")


def make_prompt(meta: dict[str, Any] | None = None, answer: str = "85") -> Prompt:
    tokens = np.array([1, 2], np.int32)
    return Prompt(7, tokens, text="37+48=", answer=answer, source="train.jsonl", meta=meta or {})


def context(**graders: dict[str, Any]) -> HookContext:
    return HookContext({"graders": graders})


def run(call: Coroutine[Any, Any, T]) -> T:
    """Run an async grader once, and close its connections."""

    async def main() -> T:
        try:
            return await call
        finally:
            if client := http._CLIENTS.pop(asyncio.get_running_loop(), None):
                await client.aclose()

    return asyncio.run(main())


def grade(
    name: str, prompt: Prompt, texts: Sequence[str], config: dict[str, Any], **settings: Any
) -> list[Any]:
    """The event of each text, from a pool with processes of its own."""
    cfg = HookConfig(**{"deadline_s": 120.0, **settings})
    with HookPool(cfg, [GRADERS[name]], config) as pool:
        samples = [make_sample(text, number) for number, text in enumerate(texts)]
        ids = [pool.submit(SampleTask(prompt, sample, CallInfo())) for sample in samples]
        events = events_of(pool)
    return [events[task_id] for task_id in ids]
