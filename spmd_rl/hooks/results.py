"""Results of reward functions: what they may return, and how several make one reward."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

import msgspec
import numpy as np

from spmd_rl.errors import printable
from spmd_rl.observe.metrics import METRIC_OF_NAME
from spmd_rl.types.prompts import Prompt, prompt_name
from spmd_rl.types.samples import Sample

MAX_PREVIEW = 200  # characters
WHOLE = "reward"  # the part that the sample's reward is
# of a number from a hook, so that sums and squares of many stay finite in float32 too
MAX_NUMBER = 1e15
MAX_VALUES = 1000  # that a hook may return or emit for one sample


class Grade(msgspec.Struct, frozen=True, array_like=True):
    """A reward, and its parts where the function returned a mapping or there are several."""

    reward: float
    parts: dict[str, float] = {}


class BadResult(ValueError):
    """A hook returned what it may not; the text is the end of a sentence about it."""


def as_grade(result: Any) -> Grade:
    """Return the grade that a function's result is. Raises: BadResult."""
    if type(result) is float and abs(result) <= MAX_NUMBER:
        return Grade(result)
    if not isinstance(result, Mapping):
        return Grade(_number(result, WHOLE))
    if WHOLE not in result:
        raise BadResult(f"returned a dict without the key 'reward': {preview(result)}")
    if len(result) > MAX_VALUES:
        raise BadResult(f"returned {len(result)} values, and at most {MAX_VALUES} may be")
    parts = {encodable(str(key)): _number(value, str(key)) for key, value in result.items()}
    for key in parts:
        if f"reward/{key}" in METRIC_OF_NAME:
            raise BadResult(
                f"returned a value called {key!r}, but reward/{key} is a metric of its own: "
                "choose another name"
            )
    return Grade(parts[WHOLE], parts)


def as_grades(results: Any, num_samples: int) -> list[Grade]:
    """Return the grades that a whole group's results are. Raises: BadResult."""
    if not isinstance(results, (list, tuple, np.ndarray)):
        raise BadResult(f"returned no list with one result a sample: {preview(results)}")
    if len(results) != num_samples:
        raise BadResult(f"returned {len(results)} results for {num_samples} samples")
    return [as_grade(result) for result in results]


def merged(grades: Mapping[str, Grade], weights: Mapping[str, float]) -> Grade:
    """Return the weighted sum of grades by the name of their function.

    The parts hold each one under that name, and its own parts as NAME.PART.
    """
    parts: dict[str, float] = {}
    for name, grade in grades.items():
        parts[name] = grade.reward
        parts |= {f"{name}.{key}": part for key, part in grade.parts.items() if key != WHOLE}
    return Grade(math.fsum(weights[name] * grade.reward for name, grade in grades.items()), parts)


def preview(value: object, as_text: Callable[[object], str] = repr) -> str:
    """Return the beginning of a user's value as text, or its type if that cannot be shown."""
    try:
        text = as_text(value)
    except Exception:  # noqa: BLE001  a user's type may raise anything here
        text = f"a {type(value).__name__}"
    return printable(text if len(text) <= MAX_PREVIEW else text[:MAX_PREVIEW] + "...")


def encodable(text: str) -> str:
    """Return a text with lone surrogates, which UTF-8 cannot encode, written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def problem_of(error: BaseException, function: Any) -> str:
    """Return what went wrong in a hook, as the end of a sentence."""
    if isinstance(error, BadResult):
        return str(error)
    return f"raised {type(error).__name__}: {preview(error, str)}{_line_of(error, function)}"


def describe(prompt: Prompt, samples: Sequence[Sample]) -> str:
    """Return the prompt and the sample or samples that a hook was called on."""
    texts = f"prompt {preview(prompt.text)}, answer {preview(prompt.answer)}"
    if len(samples) != 1:
        return f"{prompt_name(prompt.uid)} ({texts}, {len(samples)} samples)"
    (sample,) = samples
    texts += f", response {preview(sample.text)}"
    return f"{prompt_name(prompt.uid)} sample {sample.index} ({texts})"


def describe_episode(prompt: Prompt, index: int) -> str:
    """Return the prompt that `generate` was called on, and which sample of it."""
    texts = f"prompt {preview(prompt.text)}, answer {preview(prompt.answer)}"
    return f"{prompt_name(prompt.uid)} sample {index} ({texts})"


def _line_of(error: BaseException, function: Any) -> str:
    """Return where in the function's own file the error was raised, or "" if elsewhere."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = code.co_filename if code else None
    lines = [one.lineno for one in extract_tb(error.__traceback__) if one.filename == file]
    return f" (at {Path(file).name}:{lines[-1]})" if file and lines else ""


def _number(value: Any, key: str) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except Exception:  # noqa: BLE001  a user's type may raise anything here
        number = math.nan
    if not math.isfinite(number):
        raise BadResult(f"returned no finite number as {preview(key)}: {preview(value)}")
    if abs(number) > MAX_NUMBER:
        raise BadResult(
            f"returned {preview(value)} as {preview(key)}: expected at most {MAX_NUMBER:g} in size"
        )
    return number
