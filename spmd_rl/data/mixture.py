"""Mixture of data sources: which source each draw takes, a pure function of seed and draw."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.files.files import without_slice
from spmd_rl.errors import ConfigError

Pick = Callable[[int, list[str]], Mapping[str, float]]

_BLOCK = 4096  # draws that are placed at once
_KEPT = 2  # blocks
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: multiples spread evenly


def data_weights(data: str | Mapping[str, float]) -> dict[str, float]:
    """Return paths and their weights from the setting `data`.

    Raises: ConfigError for no path, and for a weight that is not above 0.
    """
    if isinstance(data, str):
        data = {data: 1.0} if data else {}
    if not data or "" in data:
        raise ConfigError("--data is missing: name a file")
    for path, weight in data.items():
        if not 0 < weight < math.inf:
            raise ConfigError(f"data: the weight of {path} must be above 0 and finite: {weight}")
    return dict(data)


def source_names(paths: Sequence[str]) -> list[str]:
    """Return a short name for each path: the file's stem.

    Where two are equal, all names get their folders too, and at last numbers.
    """
    files = [without_slice(path).absolute() for path in paths]
    parts = [(file.with_suffix("") if file.is_file() else file).parts for file in files]
    for depth in (1, 2, 3):
        names = ["-".join(part for part in of[-depth:] if part != "/") for of in parts]
        if len({*names}) == len(names):
            return names
    return [f"{of[-1]}-{number}" for number, of in enumerate(parts, start=1)]


class Mixture:
    """Places draws: the number of the source, and which draw of that source it is.

    After any number of draws, each source has had its share but for a few draws. `pick`, if there
    is one, returns the weights for each step of `per_step` draws.
    Raises: ConfigError in `places` for weights of `pick` that cannot be used.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        seed: int,
        pick: Pick | None = None,
        per_step: int = 1,
    ) -> None:
        self.names = [*weights]
        # without `pick` the weights are looked at once a block
        self._pick, self._per_step = pick or (lambda *_: weights), per_step if pick else _BLOCK
        digest = hashlib.sha256(f"{seed}/mixture".encode()).digest()
        self._offset = np.uint64(int.from_bytes(digest[:8], "little"))
        # how many draws of each source are in the blocks before each block
        self._before = [np.zeros(len(weights), np.int64)]
        self._block = lru_cache(_KEPT)(self._placed)  # by its number

    def places(self, draws: Sequence[int]) -> list[tuple[int, int]]:
        """Return source and draw within the source of each of these draws."""
        if len(self.names) == 1:
            return [(0, draw) for draw in draws]
        found = []
        for draw in draws:
            sources, places = self._block(draw // _BLOCK)
            found.append((int(sources[draw % _BLOCK]), int(places[draw % _BLOCK])))
        return found

    def _placed(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return source and place of each draw of a block."""
        while len(self._before) <= number:
            counts = np.bincount(self._sources(len(self._before) - 1), minlength=len(self.names))
            self._before.append(self._before[-1] + counts)
        sources = self._sources(number)
        places = np.empty(_BLOCK, np.int64)
        for source, before in enumerate(self._before[number]):
            (at,) = np.nonzero(sources == source)
            places[at] = np.arange(before, before + len(at))
        return sources, places

    def _sources(self, block: int) -> NDArray[np.int64]:
        """Return the source of each draw of a block."""
        draws = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        # 53 bits of an equally distributed number, as a fraction of 1
        at = ((self._offset + draws * _STRIDE) >> np.uint64(11)) * 2.0**-53
        sources = np.empty(_BLOCK, np.int64)
        steps = draws.astype(np.int64) // self._per_step
        for step in range(int(steps[0]), int(steps[-1]) + 1):
            of_step = steps == step
            bounds = self._bounds_of(step)
            sources[of_step] = np.searchsorted(bounds, at[of_step], side="right")
        return sources

    def _bounds_of(self, step: int) -> NDArray[np.float64]:
        """Return where each source ends between 0 and 1 in a step."""
        weights = self._pick(step, [*self.names])
        is_usable = isinstance(weights, Mapping) and all(
            name in self.names and isinstance(weight, (int, float)) and 0 <= weight < math.inf
            for name, weight in weights.items()
        )
        if not is_usable or not any(weights.values()):
            raise ConfigError(
                f"hooks.pick_sources returned {weights!r} for step {step + 1}: it must return "
                f"weights of 0 or more, at least one above 0, for sources of {self.names}"
            )
        sums = np.cumsum([float(weights.get(name, 0)) for name in self.names])
        bounds: NDArray[np.float64] = sums / sums[-1]
        return bounds
