"""Prefix sharing: which pages of a prompt others may use, and which row computes its tail.

The reusable prefix of a sequence is all of it but the last token, which each sequence computes for
itself to draw from. Full pages are shared. The rest of the prefix lies on the next page; this tail
is copied once a row has computed it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.pages import PagePool, extend_keys, root_key, tail_key
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan


class PrefixKeys(NamedTuple):
    """Keys of a sequence's full pages and of its tail.

    `tail` is b"" if the tail is too short to be worth a copy.
    """

    pages: list[bytes]
    tail: bytes


NO_KEYS = PrefixKeys([], b"")


class PrefixSharing:
    """Keys of the rows and requests of one scheduler, under the present weights."""

    def __init__(
        self, table: SequenceTable, pool: PagePool, *, min_tail: int, enabled: bool
    ) -> None:
        self._table = table
        self._pool = pool
        self._page_size = table.page_size
        self._min_tail = min_tail
        self._enabled = enabled
        self._root = root_key(0)
        self._latest: tuple[Request | NDArray[np.int32] | None, PrefixKeys] = (None, NO_KEYS)
        self._row_keys: dict[int, list[bytes]] = {}
        # Rows that compute a tail: the length of their reusable prefix, and the tail's key.
        self._tails: dict[int, tuple[int, bytes]] = {}
        self._tails_in_progress: set[bytes] = set()

    def begin_version(self, version: int) -> None:
        """Make keys for weights `version` from now on, which match none made before."""
        self._root = root_key(version)
        self._latest = None, NO_KEYS

    def keys_of(self, request: Request) -> PrefixKeys:
        """Return the keys of `request`'s tokens.

        The newest keys are cached: samples of one prompt follow each other, and a request that
        waits is looked up in many steps.
        """
        if not self._enabled:
            return NO_KEYS
        source = request if len(request.past) else request.prompt
        latest, keys = self._latest
        if latest is not source:
            keys = self._make_keys(np.concatenate([request.prompt, request.past.tokens]))
            self._latest = source, keys
        return keys

    def is_tail_in_progress(self, prefix: PrefixKeys) -> bool:
        """Return whether a row is computing the tail, so that waiting for it pays."""
        return prefix.tail in self._tails_in_progress

    def add_row(self, row: int, prefix: PrefixKeys) -> None:
        self._row_keys[row] = prefix.pages.copy()

    def copy_row(self, row: int, parent: int) -> None:
        """Give the fork `row` the keys of `parent`."""
        self._row_keys[row] = self._row_keys[parent].copy()

    def remove_row(self, row: int) -> None:
        del self._row_keys[row]
        self._end_tail(row)

    def begin_tail(self, row: int, prefix: PrefixKeys, num_tokens: int) -> None:
        """Note that `row`, of `num_tokens` tokens, computes the tail of `prefix` itself."""
        if prefix.tail:
            self._tails[row] = num_tokens - 1, prefix.tail
            self._tails_in_progress.add(prefix.tail)

    def publish_tails(self, rows: NDArray[np.int64]) -> None:
        """Let others copy the tails that `rows` have computed by now."""
        if not self._tails:
            return
        for row, count in zip(rows.tolist(), self._table.num_computed[rows].tolist(), strict=True):
            if row not in self._tails:
                continue
            num_reusable, tail = self._tails[row]
            if count >= num_reusable:
                self._end_tail(row)
                page = self._table.pages[row, num_reusable // self._page_size]
                self._pool.publish_tail(int(page), tail)

    def publish_filled_pages(self, plan: StepPlan) -> None:
        """Publish the pages that `plan` fills with tokens that the host has."""
        ends = plan.starts + plan.lengths
        num_full = np.minimum(ends, self._table.host_length(plan.rows)) // self._page_size
        filling = self._table.num_published_pages[plan.rows] < num_full
        for row, end in zip(plan.rows[filling].tolist(), num_full[filling].tolist(), strict=True):
            self.publish_pages(row, end)

    def publish_pages(self, row: int, end: int) -> None:
        """Publish the pages of `row` before page `end`, the newest of which this step fills.

        Others may share them in this very step: a layer writes the K/V of all tokens before any
        token attends.
        """
        begin = int(self._table.num_published_pages[row])
        if not self._enabled or begin == end:
            return
        keys = self._row_keys[row]
        tokens = self._table.tokens[row, : end * self._page_size]
        extend_keys(keys, self._root, tokens, self._page_size)
        for page in range(begin, end):
            self._pool.publish(int(self._table.pages[row, page]), keys[page])
        self._table.num_published_pages[row] = end

    def _end_tail(self, row: int) -> None:
        if row in self._tails:
            self._tails_in_progress.discard(self._tails.pop(row)[1])

    def _make_keys(self, tokens: NDArray[np.int32]) -> PrefixKeys:
        tokens = tokens.astype(np.int32, copy=False)
        keys: list[bytes] = []
        extend_keys(keys, self._root, tokens, self._page_size)
        num_full = (len(tokens) - 1) // self._page_size
        tail = tokens[num_full * self._page_size : -1]
        if len(tail) < self._min_tail:
            return PrefixKeys(keys, b"")
        return PrefixKeys(keys, tail_key(keys[:num_full], self._root, tail))
