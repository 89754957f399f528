"""Episodes of the examples, played in a process of hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeTask
from spmd_rl.hooks.signatures import check_hooks
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import TokenData
from tests.unit.hooks.cases import character_model, events_of


def played(hooks: Path, prompt: Prompt, *said: str) -> tuple[Sample, list[EngineCall]]:
    """Play an episode of the file's `solve`; the engine of this test says these turns."""
    calls: list[EngineCall] = []

    def answer(call: EngineCall) -> None:
        text = said[len(calls)]
        tokens = np.array([*map(ord, text)], np.int32)
        logprobs, versions = np.full(len(text), -0.5, np.float32), np.full(len(text), 4, np.int32)
        calls.append(call)
        pool.reply(call.task_id, call.call_id, Turn(TokenData(tokens, logprobs, versions), text))

    cfg = HookConfig(generate=f"{hooks}:solve")
    check_hooks(cfg)
    with HookPool(cfg, model=character_model()) as pool:
        task = pool.submit(EpisodeTask(prompt, 0, 1, 1.0, CallInfo()))
        event: Any = events_of(pool, answer)[task]
    (sample,) = event.samples
    return sample.replace(text="".join(map(chr, sample.tokens))), calls
