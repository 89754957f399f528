"""Calling a reward function on one sample, so that whatever it does ends in a number or a clear sentence."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.rewards.load import Reward
from spmd_rl.types import Prompt, Sample


def grade(reward: Reward, prompt: Prompt, sample: Sample, deadline_s: float = 0.0) -> Sample:
    """The sample with its reward and, where the function returned a dict, the named parts.

    Blocks: for `deadline_s` at most, unless it is 0; where C code never returns to Python, the call's deadline ends it.
    Raises: DataError that shows the sample when the function raises, takes longer, or returns no finite number.
    """
    try:
        with _TimeLimit(deadline_s):
            result: Any = reward(prompt, sample)
    except _Overdue:
        raise DataError(_where(reward, prompt, sample), f"took longer than {deadline_s:g} s") from None
    except Exception as error:  # the function is the user's: whatever it raises is told with the sample it met
        raise DataError(_where(reward, prompt, sample), f"raised {type(error).__name__}: {error}") from error
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise DataError(_where(reward, prompt, sample), f"returned a dict without the key 'reward': {parts}")
    checked = {key: _number(value) for key, value in parts.items()}
    for key, value in checked.items():
        if not math.isfinite(value):
            raise DataError(_where(reward, prompt, sample), f"returned no finite number as {key!r}: {parts[key]!r}")
    return replace(sample, reward=checked["reward"], parts=checked if isinstance(result, Mapping) else {})


class _Overdue(BaseException):
    """No Exception: a reward that survives its own errors must not survive this."""


class _TimeLimit(AbstractContextManager[None]):
    """Raises _Overdue inside after `seconds`; 0 does not. The main thread's only, which keeps the alarm's handler.

    A function that sets an alarm of its own, as math_verify does, ends ours.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        if self._seconds:
            if signal.getsignal(signal.SIGALRM) is not _ring:
                signal.signal(signal.SIGALRM, _ring)
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _ring(number: int, frame: FrameType | None) -> None:
    raise _Overdue


def _number(value: Any) -> float:
    """`value` as a float; NaN when it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _where(reward: Reward, prompt: Prompt, sample: Sample) -> str:
    code = getattr(reward, "__code__", None)
    name = f"{Path(code.co_filename).stem}:{code.co_qualname}" if code else repr(reward)
    shown = f"prompt {_short(prompt.text)}, answer {_short(prompt.answer)}, response {_short(sample.text)}"
    return f"reward {name} on prompt {prompt.uid} sample {sample.index} ({shown})"


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
