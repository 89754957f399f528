"""Grader that asks a server of the user's for each sample's reward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.rewards.config import graders_of
from spmd_rl.rewards.remote.http import HttpRequest, as_json, ask, header_values
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.hooks.context import HookContext

MAX_REWARD = 1e9  # of a reward or a part of it, in either direction


async def remote(ctx: HookContext, prompt: Prompt, sample: Sample) -> float | dict[str, float]:
    """Return the reward that `graders.remote.url` answers with, and its parts if there are some.

    Raises: ServerError when there is no answer that can be used, which fails the sample.
    """
    cfg = graders_of(ctx.config).remote
    body: dict[str, Any] = {
        "prompt": prompt.text,
        "response": sample.answer,
        "label": prompt.answer,
        "meta": prompt.meta,
    }
    if len(sample.messages) > 1:
        body["messages"] = sample.messages
    headers = header_values(cfg.headers_from, "graders.remote.headers_from")
    request = HttpRequest(cfg.url, as_json(body), headers, cfg)
    return await ask(request, _reward)


def _reward(answer: bytes) -> float | dict[str, float]:
    """Return the reward in an answer. Raises: ValueError."""
    try:
        value: Any = msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise ValueError("the answer is no JSON") from error
    if _is_number(value):
        return float(value)
    if not isinstance(value, dict) or not _is_number(value.get("reward")):
        raise ValueError("the answer is no number, and no object with a number as its reward")
    # texts and the like beside the numbers are the server's own affair
    return {name: float(part) for name, part in value.items() if _is_number(part)}


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and abs(value) <= MAX_REWARD
