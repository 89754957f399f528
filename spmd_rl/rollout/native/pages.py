"""Pool of KV pages: reference counts, and the prefixes that later requests may share.

A page is free, in use by one or more sequences, or idle. No sequence uses an idle page, but it
still keeps the K/V of a published prefix. A page is published under a key once every slot of it is
written, or will be by the running step. Only published pages are shared, so nobody writes to a
shared page. The key covers the weights version and every token from the start of the sequence to
the end of the page.

A prompt rarely ends with a page. The rest of it, on its last page, is its tail. Another sequence
with the same prompt can copy the tail while the page is in use or idle.
Slots of states stand beside the pages, for layers that hand states on.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.kv_pages import snapshot_slots


def root_key(version: int) -> bytes:
    """Return the key that a sequence's first page is chained to."""
    return blake2b(f"version {version}".encode(), digest_size=16).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: NDArray[np.int32], page_size: int) -> None:
    """Append to `keys` until every full page of `tokens` has one."""
    for page in range(len(keys), len(tokens) // page_size):
        chunk = tokens[page * page_size : (page + 1) * page_size]
        previous = keys[-1] if keys else root
        keys.append(blake2b(previous + chunk.tobytes(), digest_size=16).digest())


def tail_key(keys: list[bytes], root: bytes, tail: NDArray[np.int32]) -> bytes:
    """Return the key of `tail`, tokens that follow the full pages of `keys` and fill no page."""
    previous = keys[-1] if keys else root
    return blake2b(previous + tail.tobytes(), digest_size=16, person=b"tail").digest()


class PagePool:
    """Counts references to pages; evicts the least recently used idle page when none is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_refs = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._tail_keys: list[bytes | None] = [None] * num_pages
        self._by_tail_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """Return a private page of unknown content. The caller makes sure that one is available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self.num_evictions += 1
        self._num_refs[page] = 1
        return page

    def find_prefix(self, keys: list[bytes]) -> list[int]:
        """Return the pages of the longest published prefix of `keys`, without a reference."""
        pages = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def retain(self, pages: list[int]) -> None:
        """Add a reference to each of `pages`."""
        for page in pages:
            if not self._num_refs[page]:
                del self._idle[page]
            self._num_refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """Drop a reference to each of `pages`, in the order of one sequence.

        Of pages that become idle, the end of the prefix is evicted first.
        """
        for page in reversed(pages):
            self._num_refs[page] -= 1
            if self._num_refs[page]:
                continue
            if self._keys[page] is None:
                self._forget_tail(page)
                self._free.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Let others find `page` by `key`, unless an equal page is published already."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._keys[page] = key

    def find_tail(self, key: bytes) -> int | None:
        """Return a page that begins with the tail of `key`, if there is one."""
        return self._by_tail_key.get(key)

    def publish_tail(self, page: int, key: bytes) -> None:
        """Let others copy the tail on `page`, unless an equal tail is published already.

        A sequence must be using the page.
        """
        if key not in self._by_tail_key:
            self._by_tail_key[key] = page
            self._tail_keys[page] = key

    def forget_prefixes(self) -> None:
        """Forget all keys. Idle pages become free; pages in use stay with their sequences."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._keys = [None] * self.num_pages
        self._by_tail_key.clear()
        self._tail_keys = [None] * self.num_pages

    def _forget_tail(self, page: int) -> None:
        key = self._tail_keys[page]
        if key is not None:
            del self._by_tail_key[key]
            self._tail_keys[page] = None

    def _forget(self, page: int) -> None:
        self._forget_tail(page)
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None


class Prefix(NamedTuple):
    """Tokens from the start of a sequence: the key of its full pages, and the tokens after them."""

    pages: bytes
    tail: bytes


class StateSnapshots:
    """Slots with what layers hand on after some tokens, for other sequences to begin at.

    A layer that hands a state on cannot share a prefix by its pages alone. So the row that computes
    a prompt stops before its last token, and its states are copied to a slot. Other samples of the
    prompt begin there, and so do longer prompts, as of a conversation that went on.
    The slots are `first` to `first + count - 1`; that used least recently is overwritten.
    """

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))
        self._slots: OrderedDict[Prefix, int] = OrderedDict()
        self._tails: dict[bytes, list[bytes]] = {}  # by the key of the pages before

    def tails_after(self, pages: bytes) -> list[bytes]:
        """Return the tokens after these pages that have snapshots, the longest first."""
        return sorted(self._tails.get(pages, ()), key=len, reverse=True)

    def slot(self, prefix: Prefix) -> int:
        """Return the slot of a prefix that `tails_after` named, and count it as used."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def take(self, prefix: Prefix) -> int:
        """Return the slot that the states after a prefix are to be written to."""
        if prefix in self._slots:
            return self.slot(prefix)
        if self._free:
            slot = self._free.pop()
        else:
            oldest, slot = self._slots.popitem(last=False)
            self._tails[oldest.pages].remove(oldest.tail)
            if not self._tails[oldest.pages]:
                del self._tails[oldest.pages]
        self._slots[prefix] = slot
        self._tails.setdefault(prefix.pages, []).append(prefix.tail)
        return slot

    def forget(self) -> None:
        self._free += self._slots.values()
        self._slots.clear()
        self._tails.clear()


def state_snapshots(spec: ModelSpec, batch: int) -> StateSnapshots | None:
    """Return the slots of snapshots; None for a model whose layers hand no states on."""
    return StateSnapshots(*snapshot_slots(batch)) if spec.has_states else None
