"""Context of a hook: what the run tells a function besides its prompt and sample."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from spmd_rl.hooks.results import MAX_NUMBER, MAX_VALUES, encodable

MAX_NOTE, MAX_NAME = 1000, 200  # characters
MAX_NOTES = 100


class CallInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells a hook of the call: the step, the version of the weights, and the seed."""

    step: int = 0
    version: int = 0
    evaluation: bool = False
    seed: int = 0


class KeptResults:
    """Results that an episode has kept, as msgpack; `send` tells the rank of a new one."""

    def __init__(
        self, results: dict[str, bytes], send: Callable[[str, bytes], None] | None = None
    ) -> None:
        self.results, self._send = results, send

    def keep(self, name: str, value: bytes) -> None:
        self.results[name] = value
        if self._send is not None:
            self._send(name, value)


@dataclass(frozen=True)
class HookContext:
    """What the run tells a hook besides its prompt and sample.

    `config` is the recipe's config as plain nested data. `version` is that of the engine's weights.
    `prompt_uid` and `sample_index` name what the hook is called for; the index of a whole group
    is 0.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    version: int = 0
    evaluation: bool = False
    seed: int = 0
    prompt_uid: int = 0
    sample_index: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # what was emitted so far
    notes: dict[str, str] = field(default_factory=dict)  # what was noted so far
    kept: KeptResults = field(default_factory=lambda: KeptResults({}))

    @cached_property
    def rng(self) -> np.random.Generator:
        """Random numbers that depend on the run's seed, the prompt and the sample's index alone."""
        return np.random.default_rng((self.seed, self.prompt_uid, self.sample_index))

    async def once(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Return what `make` returned in the first run of this episode, which calls it.

        An episode that is aborted, or whose process has ended, runs again from its start. What must
        not happen twice then, such as a tool that changes something, goes through here. The result
        is plain data: numbers, texts, bytes, None, and lists and dicts of them.
        Raises: what `make` raises; TypeError for a result that is not plain data.
        """
        if name not in self.kept.results:
            self.kept.keep(name, msgspec.msgpack.encode(await make()))
        return msgspec.msgpack.decode(self.kept.results[name])

    def emit(self, name: str, value: float) -> None:
        """Record a value beside the sample; its metric is the mean over the step's samples.

        A second value of the same name takes the place of the first.
        Raises: ValueError for what is no finite number, or too large a one, and for one name too
        many.
        """
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"emit({name!r}, {value!r}): expected a finite number")
        if abs(number) > MAX_NUMBER:
            raise ValueError(f"emit({name!r}, {value!r}): expected at most {MAX_NUMBER:g} in size")
        _put(self.metrics, "emit", name, number, MAX_VALUES)

    def note(self, name: str, text: str) -> None:
        """Record a text in the sample's `metadata["notes"]`, such as the version of a judge.

        Its first 1000 characters are kept. A second text of the same name takes the place of the
        first. Raises: ValueError for one name too many.
        """
        _put(self.notes, "note", name, encodable(str(text)[:MAX_NOTE]), MAX_NOTES)


def _put(told: dict[str, Any], call: str, name: str, value: float | str, limit: int) -> None:
    """Record a value under a name, of which there may be `limit`. Raises: ValueError."""
    key = encodable(str(name)[:MAX_NAME])
    if key not in told and len(told) == limit:
        raise ValueError(f"{call}({key!r}, ...): there are {limit} names for this sample already")
    told[key] = value


@dataclass(frozen=True)
class Keep:
    """Answer of `keep_group`: whether the group is trained on, and why not. `reason` is a word or
    two, by which such groups are counted.
    """

    ok: bool
    reason: str = ""
