"""What samples of one prompt share, and who of them is computing it.

A sequence's stem is all but its last token, which each computes for itself to draw from. Its full
pages are shared; what is left on the next page, the tail, is copied once somebody has computed it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.pages import PagePool, extend_keys, root_key, tail_key


class SharedPrefix(NamedTuple):
    """The keys of a sequence's full pages, and of its tail; `tail` is b"" where it is too short to
    be worth a copy.
    """

    keys: list[bytes]
    tail: bytes


class PrefixSharing:
    """The stems of one scheduler's requests, under the present weights."""

    def __init__(self, pool: PagePool, page_size: int, *, min_tail: int, enabled: bool) -> None:
        self.root = root_key(0)
        self._pool = pool
        self._page_size = page_size
        self._min_tail = min_tail
        self._enabled = enabled
        self._latest: tuple[Request | NDArray[np.int32] | None, SharedPrefix] = (
            None,
            SharedPrefix([], b""),
        )
        self._by_row: dict[int, tuple[int, bytes]] = {}
        self._under_way: set[bytes] = set()

    def new_version(self, version: int) -> None:
        """Stems of other weights are other stems."""
        self.root = root_key(version)
        self._latest = None, SharedPrefix([], b"")

    def of(self, request: Request) -> SharedPrefix:
        """Samples of one prompt come one after the other, and get the same stem; a request may be
        asked of often.
        """
        if not self._enabled:
            return SharedPrefix([], b"")
        key = request if len(request.tokens) else request.prompt
        latest, stem = self._latest
        if latest is not key:
            stem = self._new(np.concatenate([request.prompt, request.tokens]))
            self._latest = key, stem
        return stem

    def is_under_way(self, stem: SharedPrefix) -> bool:
        """Whether a row is computing the tail, so that it pays to wait."""
        return stem.tail in self._under_way

    def begin(self, row: int, stem: SharedPrefix, num_tokens: int) -> None:
        """`row` computes the stem of its `num_tokens` tokens itself."""
        if stem.tail:
            self._by_row[row] = num_tokens - 1, stem.tail
            self._under_way.add(stem.tail)

    def leave(self, row: int) -> None:
        if self._by_row:
            self._under_way.discard(self._by_row.pop(row, (0, b""))[1])

    def publish(
        self, rows: NDArray[np.int64], computed: NDArray[np.int64], pages: NDArray[np.int64]
    ) -> None:
        """Let others copy the tails that `rows` have computed by now.

        Shape: rows and computed [B]; pages [num_rows, P].
        """
        if not self._by_row:
            return
        for row, count in zip(rows.tolist(), computed.tolist(), strict=True):
            num_stem, tail = self._by_row.get(row, (count + 1, b""))
            if count >= num_stem:
                self.leave(row)
                self._pool.publish_tail(int(pages[row, num_stem // self._page_size]), tail)

    def _new(self, tokens: NDArray[np.int32]) -> SharedPrefix:
        tokens = tokens.astype(np.int32, copy=False)
        keys: list[bytes] = []
        extend_keys(keys, self.root, tokens, self._page_size)
        full = (len(tokens) - 1) // self._page_size
        tail = tokens[full * self._page_size : -1]
        return SharedPrefix(
            keys, tail_key(keys[:full], self.root, tail) if len(tail) >= self._min_tail else b""
        )
