"""Calling a reward function on samples, so that whatever it does ends in a number or a clear
sentence.
"""

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
from spmd_rl.observe.metrics import KNOWN
from spmd_rl.rewards.load import Reward
from spmd_rl.types.samples import Prompt, Sample

LONGEST_SHOWN = 200  # characters


class Grader(AbstractContextManager["Grader"]):
    """Calls `reward` on one sample after the other, for each of which it may take `deadline_s`; 0
    is for ever.

    One alarm serves all that are graded while this is entered: where it rings before the present
    sample is overdue, it is set again for what that has left. The main thread's only, which keeps
    the alarm's handler. A function that sets an alarm of its own, as math_verify does, ends ours
    for the sample at hand.
    """

    def __init__(self, reward: Reward, deadline_s: float = 0.0) -> None:
        self._reward = reward
        self._deadline_s = deadline_s
        self._due = math.inf
        self.spent_s = 0.0  # in the function, so far
        self._pid, self._folder = os.getpid(), os.getcwd()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        os.chdir(self._folder)  # wherever the function went
        if self._deadline_s:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def grade(self, prompt: Prompt, sample: Sample) -> Sample:
        """The sample with its reward and, where the function returned a dict, the named parts.

        The arrays of both are read-only from here on: what the trainer learns is what the engine
        made.
        Blocks: until its deadline at most; where C code never returns to Python, the call's
        deadline ends it.
        Raises: DataError that shows the sample when the function raises, takes longer, or returns
        no finite number.
        """
        for array in (prompt.tokens, sample.tokens, sample.logprobs, sample.versions):
            array.setflags(write=False)
        try:
            result = self._timed(prompt, sample)
        except _Overdue:
            raise DataError(
                self._where(prompt, sample), f"took longer than {self._deadline_s:g} s"
            ) from None
        # the function is the user's: whatever it raises is told with the sample it met
        except BaseException as error:
            if os.getpid() != self._pid:  # a process that it forked ends as it likes
                raise
            problem = f"raised {type(error).__name__}: {_shown(error, str)}{self._line(error)}"
            raise DataError(self._where(prompt, sample), problem) from error
        if not isinstance(result, Mapping):
            return sample.changed(reward=self._number(result, "reward", prompt, sample))
        if "reward" not in result:
            raise DataError(
                self._where(prompt, sample),
                f"returned a dict without the key 'reward': {_shown(result)}",
            )
        parts = {
            str(key): self._number(value, str(key), prompt, sample) for key, value in result.items()
        }
        if taken := [key for key in parts if f"reward/{key}" in KNOWN]:
            problem = f"returned a value called {taken[0]!r}: the metric reward/{taken[0]} is another, choose another name"
            raise DataError(self._where(prompt, sample), problem)
        return sample.changed(reward=parts["reward"], parts=parts)

    def _timed(self, prompt: Prompt, sample: Sample) -> Any:
        if self._deadline_s:
            self._due = time.monotonic() + self._deadline_s
            if not signal.getitimer(signal.ITIMER_REAL)[1]:  # no alarm that repeats, as ours does
                signal.signal(signal.SIGALRM, self._ring)
                signal.setitimer(signal.ITIMER_REAL, self._deadline_s, self._deadline_s)
        switches, began = _torch_switches(), time.monotonic()
        try:
            result = self._reward(prompt, sample)
            # a process that it forked came back: the ranks' work is not for that one
            if os.getpid() != self._pid:
                os._exit(0)
            return result
        finally:
            self._due = math.inf
            self.spent_s += time.monotonic() - began
            if switches and switches != _torch_switches():
                _set_torch_switches(*switches)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        left = self._due - time.monotonic()
        if left <= 0:
            raise _Overdue
        if left < self._deadline_s:
            signal.setitimer(signal.ITIMER_REAL, left, self._deadline_s)

    def _number(self, value: Any, key: str, prompt: Prompt, sample: Sample) -> float:
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)
        except Exception:  # noqa: BLE001  whatever a type of the user's raises here, it is no number
            number = math.nan
        if not math.isfinite(number):
            problem = f"returned no finite number as {_shown(key)}: {_shown(value)}"
            raise DataError(self._where(prompt, sample), problem)
        return number

    def _line(self, error: BaseException) -> str:
        """Where in the function's own file, as far as it goes."""
        code = getattr(inspect.unwrap(self._reward), "__code__", None)
        frames = [
            one
            for one in extract_tb(error.__traceback__)
            if code and one.filename == code.co_filename
        ]
        return f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""

    def _where(self, prompt: Prompt, sample: Sample) -> str:
        code = getattr(self._reward, "__code__", None)
        name = f"{Path(code.co_filename).stem}:{code.co_qualname}" if code else repr(self._reward)
        shown = f"prompt {_shown(prompt.text)}, answer {_shown(prompt.answer)}, response {_shown(sample.text)}"
        return f"reward {name} on prompt {prompt.uid} sample {sample.index} ({shown})"


class _Overdue(BaseException):
    """No Exception: a reward that survives its own errors must not survive this."""


def _torch_switches() -> tuple[bool, Any] | None:
    """What engine and trainer compute by in this process, and a judge that is a model may set:
    gradients, the dtype.
    """
    torch = sys.modules.get("torch")
    return (torch.is_grad_enabled(), torch.get_default_dtype()) if torch else None


def _set_torch_switches(gradients: bool, dtype: Any) -> None:
    torch = sys.modules["torch"]
    torch.set_grad_enabled(gradients)
    torch.set_default_dtype(dtype)


def _shown(value: object, as_text: Callable[[object], str] = repr) -> str:
    """A value of the user's in a sentence: the beginning of a long one, the type of one that raises
    when shown.
    """
    try:
        text = as_text(value)
    except Exception:  # noqa: BLE001  whatever a type of the user's raises here, the sample at hand is the news
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."
