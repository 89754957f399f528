"""Calling a reward function on one sample, so that whatever it does ends in a number or a clear sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.rewards.load import Reward
from spmd_rl.types import Prompt, Sample


def grade(reward: Reward, prompt: Prompt, sample: Sample) -> Sample:
    """The sample with its reward and, where the function returned a dict, the named parts.

    Raises: DataError that shows the sample when the function raises or returns no finite number.
    """
    try:
        result: Any = reward(prompt, sample)
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


def _number(value: Any) -> float:
    """`value` as a float; NaN when it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _where(reward: Reward, prompt: Prompt, sample: Sample) -> str:
    name = f"{getattr(reward, '__module__', '?')}:{getattr(reward, '__qualname__', repr(reward))}"
    shown = f"prompt {_short(prompt.text)}, answer {_short(prompt.answer)}, response {_short(sample.text)}"
    return f"reward {name} on prompt {prompt.uid} sample {sample.index} ({shown})"


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
