"""Pages of KV memory: who holds them, and which of them hold a prefix that a later request may
share.

A page is in exactly one state: free; held by one or more sequences; or idle, held by none but still
keeping the K/V of a known prefix. A page gets its key once every slot of it is (or in the running
step will be) written, and only pages with a key are ever shared, so nobody writes to a shared page.
The key names the weights version and every token from the start of the sequence to the page's end.

A prompt rarely ends with a page. What it leaves on its last one, its tail, can be copied by another
sequence with the same prompt for as long as the page is held or idle.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def root_key(version: int) -> bytes:
    """What the key of a first page is chained to."""
    return blake2b(f"version {version}".encode(), digest_size=16).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: NDArray[np.int32], page_size: int) -> None:
    """Append to `keys` until every full page of `tokens` has one."""
    for page in range(len(keys), len(tokens) // page_size):
        chunk = tokens[page * page_size : (page + 1) * page_size]
        keys.append(
            blake2b((keys[-1] if keys else root) + chunk.tobytes(), digest_size=16).digest()
        )


def tail_key(keys: list[bytes], root: bytes, tail: NDArray[np.int32]) -> bytes:
    """The key of `tail`, tokens that follow the full pages of `keys` and fill no page."""
    return blake2b(
        (keys[-1] if keys else root) + tail.tobytes(), digest_size=16, person=b"tail"
    ).digest()


class PagePool:
    """Counts references to pages and evicts the least recently used idle one when no page is free."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evictions = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._refs = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._by_key: dict[bytes, int] = {}
        self._tails: dict[bytes, int] = {}
        self._tail_keys: list[bytes | None] = [None] * num_pages
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """A page of one's own, with unknown content. The caller has made sure that one is
        available.
        """
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self.num_evictions += 1
        self._refs[page] = 1
        return page

    def match(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest known prefix of `keys`, not yet held."""
        pages = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            if not self._refs[page]:
                del self._idle[page]
            self._refs[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let go of a sequence's pages; of those that stay known, the end of the prefix is evicted
        first.
        """
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if self._keys[page] is None:
                self._forget_tail(page)
                self._free.append(page)
            else:
                self._idle[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Let others find `page` by `key`, unless an equal page is known already."""
        if key not in self._by_key:
            self._by_key[key] = page
            self._keys[page] = key

    def tail(self, key: bytes) -> int | None:
        """A page that begins with the tail of `key`."""
        return self._tails.get(key)

    def publish_tail(self, page: int, key: bytes) -> None:
        """Let others copy from `page`, which a sequence holds, unless an equal tail is known
        already.
        """
        if key not in self._tails:
            self._tails[key] = page
            self._tail_keys[page] = key

    def flush(self) -> None:
        """Forget every prefix; pages in use stay with their holders."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._keys = [None] * self.num_pages
        self._tails.clear()
        self._tail_keys = [None] * self.num_pages

    def _forget_tail(self, page: int) -> None:
        key = self._tail_keys[page]
        if key is not None:
            del self._tails[key]
            self._tail_keys[page] = None

    def _forget(self, page: int) -> None:
        self._forget_tail(page)
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None
