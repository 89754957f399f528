"""Calls of reward functions in their process: what a message asks for, and what comes of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.messages import Calls
from spmd_rl.hooks.results import BadResult, Grade, as_grade, as_grades, preview
from spmd_rl.hooks.signatures import RewardFunction
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_NO_METRICS: dict[str, float] = {}


class RewardCall(NamedTuple):
    """One call: the function, the prompt, and the sample or samples."""

    call_id: int
    reward: RewardFunction
    prompt: Prompt
    samples: Sequence[Sample]
    context: HookContext | None  # where the function takes one

    def start(self) -> Any:
        """Call the function; what it returns is its result, or a coroutine."""
        subject = self.samples if self.reward.form.whole_group else self.samples[0]
        if self.context is None:
            return self.reward.function(self.prompt, subject)
        return self.reward.function(self.context, self.prompt, subject)

    def grades(self, result: Any) -> list[Grade]:
        """Return a grade for each sample. Raises: BadResult."""
        if self.reward.form.whole_group:
            return as_grades(result, len(self.samples))
        return [as_grade(result)]

    @property
    def metrics(self) -> dict[str, float]:
        return self.context.metrics if self.context else _NO_METRICS


def calls_of(
    message: Calls, rewards: Sequence[RewardFunction], config: Mapping[str, Any]
) -> Iterator[RewardCall]:
    """Yield the calls of a message, in order. Their arrays are read-only, for the next function."""
    for columns in (message.prompts, message.samples):
        for name in columns.__match_args__:
            if hasattr(array := getattr(columns, name), "setflags"):
                array.setflags(write=False)
    prompts, samples = message.prompts.rows(), message.samples.rows()
    for call_id, function, info, prompt_number, first, count in zip(
        message.ids,
        message.functions,
        message.infos,
        message.prompt_of,
        message.first,
        message.counts,
        strict=True,
    ):
        reward, prompt = rewards[function], prompts[prompt_number]
        index = 0 if reward.form.whole_group else samples[first].index
        context = (
            HookContext(
                config, info.step, info.version, info.evaluation, info.seed, prompt.uid, index
            )
            if reward.form.takes_context
            else None
        )
        yield RewardCall(call_id, reward, prompt, samples[first : first + count], context)


def problem_of(error: BaseException, function: Any) -> str:
    """Return what went wrong in a hook, as the end of a sentence."""
    if isinstance(error, BadResult):
        return str(error)
    return f"raised {type(error).__name__}: {preview(error, str)}{_line_of(error, function)}"


def _line_of(error: BaseException, function: Any) -> str:
    """Return where in the function's own file the error was raised, or "" if elsewhere."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frames = [
        frame for frame in extract_tb(error.__traceback__) if frame.filename == code.co_filename
    ]
    return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
