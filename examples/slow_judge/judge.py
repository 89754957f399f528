"""The reward of this example: a judge that is right, but takes its time, like a busy server."""

from __future__ import annotations

import asyncio

import spmd_rl as rl

LONGEST_S, USUAL_S = 5.0, 2.0
SLOW_SHARE = 0.02  # of the answers take the longest


async def judge(ctx: rl.HookContext, prompt: rl.Prompt, sample: rl.Sample) -> dict[str, float]:
    """Return 1 for exactly the right sum, after a time that is drawn for the answer.

    The part `judge_s` is this time in seconds.
    """
    is_slow = ctx.rng.random() < SLOW_SHARE
    seconds = LONGEST_S if is_slow else ctx.rng.uniform(0, USUAL_S)
    await asyncio.sleep(seconds)
    is_right = sample.status == "completed" and sample.text == prompt.answer
    return {"reward": float(is_right), "judge_s": seconds}
