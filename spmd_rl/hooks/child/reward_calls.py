"""Calls of reward functions in their process: what a message asks for, and what comes of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any, NamedTuple

from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.results import BadResult, as_grade, as_grades, preview
from spmd_rl.hooks.signatures import RewardFunction
from spmd_rl.hooks.wire.messages import Calls, Result
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

_NO_METRICS: dict[str, float] = {}
_NO_NOTES: dict[str, str] = {}


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

    def answer(self, result: Any, seconds: float) -> Result:
        """Return the answer to the call. Raises: BadResult."""
        grades = (
            as_grades(result, len(self.samples))
            if self.reward.form.whole_group
            else [as_grade(result)]
        )
        metrics = self.context.metrics if self.context else _NO_METRICS
        notes = self.context.notes if self.context else _NO_NOTES
        return Result(self.call_id, seconds, grades, metrics, notes)


def calls_of(message: Calls, hooks: LoadedHooks) -> Iterator[RewardCall]:
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
        reward, prompt = hooks.rewards[function], prompts[prompt_number]
        context = None
        if reward.form.takes_context:
            index = 0 if reward.form.whole_group else samples[first].index
            context = hooks.context(info, prompt.uid, index)
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
