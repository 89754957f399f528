"""Snapshots of states: what layers hand on after some tokens, for other sequences to begin at.

A layer that hands a state on cannot share a prefix by its pages alone. So the row that computes a
prompt stops before its last token, and its states are copied to a slot. Other samples of the prompt
begin there, and so do longer prompts, as of a conversation that went on.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class Prefix(NamedTuple):
    """Tokens from the start of a sequence: the key of its full pages, and the tokens after them."""

    pages: bytes
    tail: bytes


class Snapshots:
    """Slots `first` to `first + count - 1`; the one used least recently is overwritten."""

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
