"""Grader that asks a language model whether a response passes criteria."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from spmd_rl.rewards.config import JudgeConfig, graders_of
from spmd_rl.rewards.deadline import uncounted
from spmd_rl.rewards.remote.http import HttpRequest, ServerError, as_json, ask, header_values
from spmd_rl.rewards.remote.judge_cache import JudgeCache, Judged
from spmd_rl.rewards.remote.judge_prompt import (
    REPAIR,
    Rubric,
    read_verdict,
    request_body,
    rubric_of,
    score,
)
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

if TYPE_CHECKING:
    from spmd_rl.hooks.context import HookContext


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Completion(msgspec.Struct, frozen=True):
    """What is read of a chat completion."""

    choices: list[_Choice]
    model: str = ""
    system_fingerprint: str | None = None


async def judge(ctx: HookContext, prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return the weighted share of criteria that a response passes, and each one as a part.

    The note "judge" names the model as its server calls it, its fingerprint, and a hash of the
    rubric; "judge: NAME" has the verdict on a criterion and its reason. `judge_cached` is emitted:
    1 if the verdict was known already, else 0.
    Raises: ServerError when there is no verdict that can be used, which fails the sample; DataError
    for a rubric of the record that cannot be used.
    """
    cfg = graders_of(ctx.config).judge
    rubric = rubric_of(cfg, prompt)
    body = request_body(cfg, rubric, prompt, sample)
    # weights and names are no part of it: they change the reward, and not the verdict
    key = hashlib.sha256(as_json([cfg.base_url, body])).hexdigest()
    verdicts = _cache(cfg.cache_folder, cfg.cache_entries)
    with uncounted():  # also where another call asks the same
        judged, was_known = await verdicts.get(key, lambda: _judged(cfg, rubric, body))
    ctx.emit("judge_cached", was_known)
    words = [judged.model or cfg.model, judged.fingerprint, f"rubric {rubric.digest}"]
    ctx.note("judge", " ".join(filter(None, words)))
    # a verdict of a folder may be of a time when reasons were not kept
    named = zip(rubric.criteria, judged.passed, judged.reasons, strict=False)
    for (name, *_), passes, reason in named:
        ctx.note(f"judge: {name}", f"{'passes' if passes else 'fails'}: {reason}")
    return score(judged.passed, rubric)


_cache = cache(JudgeCache)  # one in a process, by its settings


async def _judged(cfg: JudgeConfig, rubric: Rubric, body: dict[str, Any]) -> Judged:
    """Ask for a verdict, and once more if the first one is malformed."""
    messages, problem = body["messages"], ""
    for _ in range(2):
        completion = await _complete(cfg, body | {"messages": messages})
        text = completion.choices[0].message.content or ""
        try:
            verdicts = read_verdict(text, rubric)
        except ValueError as error:
            problem = str(error)
            repair = {"role": "user", "content": REPAIR.format(problem=problem)}
            messages = [*messages, {"role": "assistant", "content": text}, repair]
            continue
        passed, reasons = [one.passes for one in verdicts], [one.reason for one in verdicts]
        return Judged(passed, completion.model, completion.system_fingerprint or "", reasons)
    raise ServerError(f"the judge gave no verdict of the schema twice: {problem}")


async def _complete(cfg: JudgeConfig, body: dict[str, Any]) -> _Completion:
    variables = {"Authorization": cfg.key_from} if cfg.key_from else {}
    keys = header_values(variables, "graders.judge.key_from")
    headers = {name: f"Bearer {value}" for name, value in keys.items()}
    url = cfg.base_url.rstrip("/") + "/chat/completions"
    bounds = cfg.retries, cfg.deadline_s, cfg.away_s
    request = HttpRequest(url, as_json(body), headers, *bounds)
    return await ask(request, _read_completion)


def _read_completion(answer: bytes) -> _Completion:
    """Return the completion in an answer. Raises: ValueError."""
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"the answer is no chat completion ({error})") from error
    if not completion.choices:
        raise ValueError("the answer has no choice")
    return completion
