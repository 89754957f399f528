"""Stop checker: which requests are in the engine, and which of their newest tokens end a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.stop_strings import StopStringMatcher
from spmd_rl.types.prompts import prompt_name

DECODE_CACHE_SIZE = 1 << 16


class StopChecker:
    """Keeps every unfinished request with the stop strings that it asks for."""

    def __init__(
        self, table: SequenceTable, decode: Callable[[tuple[int, ...]], str] | None
    ) -> None:
        """`decode` turns tokens into text; without it, requests may not have stop strings."""
        self._table = table
        self._decode = lru_cache(maxsize=DECODE_CACHE_SIZE)(decode) if decode else None
        self._matchers: dict[tuple[int, int], StopStringMatcher | None] = {}

    @property
    def num_requests(self) -> int:
        return len(self._matchers)

    def add(self, request: Request) -> None:
        """Raises: SpmdError if (uid, index) is in the engine; ConfigError without a tokenizer."""
        if (request.uid, request.index) in self._matchers:
            raise SpmdError(
                f"{prompt_name(request.uid)}, sample {request.index} is in the engine already"
            )
        self._matchers[request.uid, request.index] = self._new_matcher(request)

    def remove(self, request: Request) -> None:
        del self._matchers[request.uid, request.index]

    def stopped(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of `rows` end with their newest tokens, by a stop id or a stop string.

        Shape: all [M].
        """
        stopped = (self._table.stop_ids[rows] == tokens[:, None]).any(axis=1)
        if not any(self._matchers.values()):
            return stopped
        uids, indices = self._table.uid[rows].tolist(), self._table.index[rows].tolist()
        for order, (uid, index, token) in enumerate(
            zip(uids, indices, tokens.tolist(), strict=True)
        ):
            matcher = self._matchers[uid, index]
            if matcher is not None and matcher.push(token):
                stopped[order] = True
        return stopped

    def _new_matcher(self, request: Request) -> StopStringMatcher | None:
        if not request.sampling.stop:
            return None
        if self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this engine was given none")
        matcher = StopStringMatcher(request.sampling.stop, self._decode)
        for token in request.past.tokens.tolist():
            matcher.push(token)
        return matcher
