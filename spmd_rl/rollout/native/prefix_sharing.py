"""Prefix sharing: which pages of a prompt others may use, and which row computes its tail.

The reusable prefix of a sequence is all of it but the last token, which each sequence computes for
itself to draw from. Full pages are shared. The rest of the prefix lies on the next page; this tail
is copied once a row has computed it.

Where layers hand states on, a sequence can begin only where there is a snapshot of them. So the row
that computes a tail stops at its end, and a snapshot is taken there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.pages import (
    PagePool,
    Prefix,
    StateSnapshots,
    extend_keys,
    root_key,
    tail_key,
)
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan


class PrefixKeys(NamedTuple):
    """Keys of a sequence's full pages and of its tail.

    `tail` is b"" if the tail is too short to be worth a copy.
    """

    pages: list[bytes]
    tail: bytes


NO_KEYS = PrefixKeys([], b"")


class CachedPrefix(NamedTuple):
    """The longest prefix of a request that is there: its full pages, the page that begins with its
    tail if it has any, all its tokens, and the slot of the states after them, if layers have any.
    """

    pages: list[int]
    tail_page: int | None
    num_tokens: int
    states: int | None = None


class PrefixSharing:
    """Keys of the rows and requests of one scheduler, under the present weights.

    With `snapshots`, layers of the model hand states on.
    """

    def __init__(
        self,
        table: SequenceTable,
        pool: PagePool,
        *,
        min_tail: int,
        enabled: bool,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._table = table
        self._pool = pool
        self._page_size = table.page_size
        self._snapshots = snapshots
        self._min_tail = min_tail if snapshots is None else 0
        self._enabled = enabled
        self._root = root_key(0)
        self._latest: tuple[Request | NDArray[np.int32] | None, PrefixKeys] = (None, NO_KEYS)
        self._row_keys: dict[int, list[bytes]] = {}
        # Rows that compute a tail: the length of their reusable prefix, and the tail's key.
        self._tails: dict[int, tuple[int, bytes]] = {}

    def begin_version(self, version: int) -> None:
        """Make keys for weights `version` from now on, which match none made before."""
        self._root = root_key(version)
        self._latest = None, NO_KEYS
        if self._snapshots is not None:
            self._snapshots.forget()

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

    def find(self, request: Request, prefix: PrefixKeys) -> CachedPrefix:
        """Return what is there of a request's tokens but the last, without a reference.

        At least one token is computed, for the logits that the next one is drawn from.
        """
        num_reusable = request.num_tokens - 1
        num_full = num_reusable // self._page_size
        pages = self._pool.find_prefix(prefix.pages[:num_full])
        if self._snapshots is not None:
            return self._find_snapshot(self._snapshots, request, prefix, pages)
        tail = self._pool.find_tail(prefix.tail) if len(pages) == num_full else None
        num_cached = len(pages) * self._page_size if tail is None else num_reusable
        return CachedPrefix(pages, tail, num_cached)

    def _find_snapshot(
        self, snapshots: StateSnapshots, request: Request, prefix: PrefixKeys, pages: list[int]
    ) -> CachedPrefix:
        """Return the longest prefix with a snapshot, whose pages are there too."""
        tokens = np.concatenate([request.prompt, request.past.tokens]).astype(np.int32)[:-1]
        for num_pages in range(len(pages), -1, -1):
            chain, begin = prefix.pages[:num_pages], num_pages * self._page_size
            after = tokens[begin:].tobytes()
            for tail in snapshots.tails_after(self._last_key(chain)):
                num_tail = len(tail) // tokens.itemsize
                page = self._tail_page(chain, tokens[begin : begin + num_tail])
                if after.startswith(tail) and (page is not None or not tail):
                    slot = snapshots.slot(Prefix(self._last_key(chain), tail))
                    return CachedPrefix(pages[:num_pages], page, begin + num_tail, slot)
        return CachedPrefix([], None, 0)

    def _last_key(self, chain: list[bytes]) -> bytes:
        return chain[-1] if chain else self._root

    def _tail_page(self, chain: list[bytes], tail: NDArray[np.int32]) -> int | None:
        return self._pool.find_tail(tail_key(chain, self._root, tail)) if len(tail) else None

    def num_before_stop(self, row: int, start: int, missing: int) -> int:
        """Return how many of a row's `missing` tokens behind `start` others the next step may
        compute: those before the place of a snapshot, if one is to be taken.
        """
        if self._snapshots is None or row not in self._tails:
            return missing
        return min(missing, self._tails[row][0] - start)

    def cut_at_stops(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], missing: NDArray[np.int64]
    ) -> None:
        """Cut each of `missing` to `num_before_stop`, in place. Shape: all [B]."""
        if self._snapshots is None or not self._tails:
            return
        for place, row in enumerate(rows.tolist()):
            missing[place] = self.num_before_stop(row, int(starts[place]), int(missing[place]))

    def take_snapshots(self, plan: StepPlan) -> list[tuple[int, int]]:
        """Return pairs (row, slot) of the snapshots to take once the step is computed.

        Where a step ends more prompts than there are slots, the last of them keep theirs: a slot is
        written once.
        """
        if self._snapshots is None or not self._tails:
            return []
        ends = zip(plan.rows.tolist(), (plan.starts + plan.lengths).tolist(), strict=True)
        rows = {
            self._snapshots.take(self._prefix_of(row, end)): row
            for row, end in ends
            if row in self._tails and end == self._tails[row][0]
        }
        return [(row, slot) for slot, row in rows.items()]

    def _prefix_of(self, row: int, num_tokens: int) -> Prefix:
        """Return the first tokens of a row, as snapshots name them."""
        tokens, num_full = self._table.tokens[row, :num_tokens], num_tokens // self._page_size
        chain = self._row_keys[row][:num_full]
        extend_keys(chain, self._root, tokens, self._page_size)
        return Prefix(self._last_key(chain), tokens[num_full * self._page_size :].tobytes())

    def is_tail_in_progress(self, prefix: PrefixKeys) -> bool:
        """Return whether a row is computing the tail, so that waiting for it pays."""
        return any(tail == prefix.tail for _, tail in self._tails.values())

    def add_row(self, row: int, prefix: PrefixKeys) -> None:
        self._row_keys[row] = prefix.pages.copy()

    def copy_row(self, row: int, parent: int) -> None:
        """Give the fork `row` the keys of `parent`."""
        self._row_keys[row] = self._row_keys[parent].copy()

    def remove_row(self, row: int) -> None:
        del self._row_keys[row]
        self._end_tail(row)

    def begin_tail(self, row: int, prefix: PrefixKeys, request: Request) -> None:
        """Note that `row` computes the tail of `prefix` of a request itself.

        Of an answer that goes on no snapshot is taken, for no other sequence has it.
        """
        if prefix.tail and not (self._snapshots is not None and len(request.past)):
            self._tails[row] = request.num_tokens - 1, prefix.tail

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
                if not num_reusable % self._page_size:
                    continue  # it fills pages, which are published
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
        self._tails.pop(row, None)

    def _make_keys(self, tokens: NDArray[np.int32]) -> PrefixKeys:
        tokens = tokens.astype(np.int32, copy=False)
        keys: list[bytes] = []
        extend_keys(keys, self._root, tokens, self._page_size)
        num_full = (len(tokens) - 1) // self._page_size
        tail = tokens[num_full * self._page_size : -1]
        if len(tail) < self._min_tail:
            return PrefixKeys(keys, b"")
        return PrefixKeys(keys, tail_key(keys[:num_full], self._root, tail))
