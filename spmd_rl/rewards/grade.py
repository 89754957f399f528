"""Grading: calls a reward function on samples, and turns any failure into one clear sentence."""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

Reward = Callable[[Prompt, Sample], float | Mapping[str, float]]
MAX_PREVIEW = 200  # characters


class Grader(AbstractContextManager["Grader"]):
    """Calls `reward` on one sample after another, each with a deadline; 0 means no deadline.

    One repeating alarm serves all samples that are graded while this context is entered. If it
    rings before the current sample's deadline, it is set again for the time that is left. So most
    calls need no system call for the alarm.

    It must be used on the main thread, because only that thread handles signals. A reward function
    that sets an alarm of its own, as math_verify does, cancels this deadline for its sample.
    """

    def __init__(self, reward: Reward, deadline_s: float = 0.0) -> None:
        self._reward = reward
        self._deadline_s = deadline_s
        self._deadline_at = math.inf  # of the current call, on the monotonic clock
        self.reward_time_s = 0.0  # spent in the reward function so far
        self._pid, self._folder = os.getpid(), os.getcwd()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        os.chdir(self._folder)  # the reward function may have changed it
        if self._deadline_s:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def grade(self, prompt: Prompt, sample: Sample) -> Sample:
        """Return the sample with its reward and, if the function returned a dict, its parts.

        The arrays of both arguments are made read-only, so that the trainer learns from exactly
        what the engine made.

        Blocks: until the deadline at most. If C code never returns to Python, the deadline of the
        controller's call ends the run.
        Raises: DataError that quotes the sample when the function raises, takes too long, or
        returns no finite number.
        """
        for array in (prompt.tokens, sample.tokens, sample.logprobs, sample.versions):
            array.setflags(write=False)
        result = self._call_reward(prompt, sample)
        if isinstance(result, Mapping):
            parts = self._parts(result, prompt, sample)
            return sample.replace(reward=parts["reward"], parts=parts)
        return sample.replace(reward=self._number(result, "reward", prompt, sample))

    def _call_reward(self, prompt: Prompt, sample: Sample) -> Any:
        """Call the function. Raises: DataError when it raises or takes too long."""
        try:
            return self._call_with_deadline(prompt, sample)
        except _RewardTimeout:
            raise DataError(
                self._describe(prompt, sample), f"took longer than {self._deadline_s:g} s"
            ) from None
        # a user's function may raise anything: report it with the sample
        except BaseException as error:
            if os.getpid() != self._pid:  # in a process that the function forked
                raise
            problem = f"raised {type(error).__name__}: {_preview(error, str)}{self._line_of(error)}"
            raise DataError(self._describe(prompt, sample), problem) from error

    def _call_with_deadline(self, prompt: Prompt, sample: Sample) -> Any:
        """Call the function with its deadline, and restore what it may have changed in torch."""
        if self._deadline_s:
            self._set_deadline()
        torch_state, began = _torch_state(), time.monotonic()
        try:
            result = self._reward(prompt, sample)
            if os.getpid() != self._pid:  # a process that the function forked must not go on here
                os._exit(0)
            return result
        finally:
            self._deadline_at = math.inf
            self.reward_time_s += time.monotonic() - began
            if torch_state and torch_state != _torch_state():
                _restore_torch_state(*torch_state)

    def _set_deadline(self) -> None:
        self._deadline_at = time.monotonic() + self._deadline_s
        # our alarm repeats: one that does not was set by the function, or there is none
        if not signal.getitimer(signal.ITIMER_REAL)[1]:
            signal.signal(signal.SIGALRM, self._on_alarm)
            signal.setitimer(signal.ITIMER_REAL, self._deadline_s, self._deadline_s)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        left_s = self._deadline_at - time.monotonic()
        if left_s <= 0:
            raise _RewardTimeout
        if left_s < self._deadline_s:
            signal.setitimer(signal.ITIMER_REAL, left_s, self._deadline_s)

    def _parts(self, result: Mapping[Any, Any], prompt: Prompt, sample: Sample) -> dict[str, float]:
        """Return the values of a dict. Raises: DataError for a missing, bad or reserved entry."""
        if "reward" not in result:
            problem = f"returned a dict without the key 'reward': {_preview(result)}"
            raise DataError(self._describe(prompt, sample), problem)
        parts = {
            str(key): self._number(value, str(key), prompt, sample) for key, value in result.items()
        }
        for key in parts:
            if f"reward/{key}" in METRIC_OF_NAME:
                problem = (
                    f"returned a value called {key!r}, but reward/{key} is a metric of its own: "
                    "choose another name"
                )
                raise DataError(self._describe(prompt, sample), problem)
        return parts

    def _number(self, value: Any, key: str, prompt: Prompt, sample: Sample) -> float:
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except Exception:  # noqa: BLE001  a user's type may raise anything here
            number = math.nan
        if not math.isfinite(number):
            problem = f"returned no finite number as {_preview(key)}: {_preview(value)}"
            raise DataError(self._describe(prompt, sample), problem)
        return number

    def _line_of(self, error: BaseException) -> str:
        """Return where in the function's own file the error was raised, or "" if elsewhere."""
        code = getattr(inspect.unwrap(self._reward), "__code__", None)
        if code is None:
            return ""
        frames = [
            frame for frame in extract_tb(error.__traceback__) if frame.filename == code.co_filename
        ]
        return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""

    def _describe(self, prompt: Prompt, sample: Sample) -> str:
        """Return the name of the function, and the sample that it was called on."""
        code = getattr(self._reward, "__code__", None)
        name = f"{Path(code.co_filename).stem}:{code.co_qualname}" if code else repr(self._reward)
        texts = (
            f"prompt {_preview(prompt.text)}, answer {_preview(prompt.answer)}, "
            f"response {_preview(sample.text)}"
        )
        return f"reward {name} on prompt {prompt.uid} sample {sample.index} ({texts})"


class _RewardTimeout(BaseException):
    """The deadline has passed. Not an Exception, so that a reward function does not catch it."""


def _torch_state() -> tuple[bool, Any] | None:
    """Return torch's grad mode and default dtype, which a reward model may change; None without
    torch.
    """
    torch = sys.modules.get("torch")
    return (torch.is_grad_enabled(), torch.get_default_dtype()) if torch else None


def _restore_torch_state(grad_enabled: bool, dtype: Any) -> None:
    torch = sys.modules["torch"]
    torch.set_grad_enabled(grad_enabled)
    torch.set_default_dtype(dtype)


def _preview(value: object, as_text: Callable[[object], str] = repr) -> str:
    """Return the beginning of a user's value as text, or its type if that cannot be shown."""
    try:
        text = as_text(value)
    except Exception:  # noqa: BLE001  a user's type may raise anything here
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_PREVIEW else text[:MAX_PREVIEW] + "..."
