"""Text of tokens while they are drawn: whole characters, up to a stop, without the end token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_HALF_CHARACTER = "\ufffd"  # what a tokenizer makes of bytes that are no whole character


class DrawnText:
    """Text of a reply, as a client sees it.

    `add` and `finish` return the text that is new. Held back is what may yet be taken away: the
    last token if it may be the end, bytes of half a character, and what may begin a stop.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        ends: Collection[int],
        stops: Sequence[str] = (),
    ) -> None:
        self._decode, self._ends = decode, frozenset(ends)
        self._cut = StopCut(stops)
        self._ids: list[int] = []
        self._num_given = 0  # tokens that were added, with the one that is held back
        self._last: list[int] = []  # held back, as it may be the end
        self._first = self._read = 0  # ids[first:read] is the context in which the rest is decoded

    @property
    def num_tokens(self) -> int:
        """The number of tokens that were added."""
        return self._num_given

    @property
    def stop(self) -> str:
        """The stop that ended the text, or ""."""
        return self._cut.found

    def add(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that they complete."""
        if not ids:
            return ""
        self._num_given += len(ids)
        new = [*self._last, *ids]
        self._last = new[-1:] if new[-1] in self._ends else []
        self._ids += new[: len(new) - len(self._last)]
        return self._cut.add(self._complete(is_last=False))

    def finish(self, *, ended: bool) -> str:
        """Return the rest of the text. `ended` says that the last token ended the turn."""
        if not ended:
            self._ids += self._last
        self._last = []
        return self._cut.add(self._complete(is_last=True)) + self._cut.finish()

    def _complete(self, *, is_last: bool) -> str:
        if self._read == len(self._ids):
            return ""
        before = self._decode(self._ids[self._first : self._read])
        text = self._decode(self._ids[self._first :])
        if not is_last and (len(text) <= len(before) or text.endswith(_HALF_CHARACTER)):
            return ""
        self._first, self._read = self._read, len(self._ids)
        return text[len(before) :]


class StopCut:
    """Cuts a text where one of some stops is first complete, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """Take more text; return what is certain to stand before every stop."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        starts = {stop: self._held.find(stop) for stop in self._stops}
        if found := [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]:
            _, at, self.found = min(found)
            return self._held[:at]
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        ready, self._held = self._held[: len(self._held) - keep], self._held[-keep:] * bool(keep)
        return ready

    def finish(self) -> str:
        """Return what was held back and is no stop."""
        held, self._held = self._held, ""
        return "" if self.found else held


def _overlap(text: str, stop: str) -> int:
    """Return how many of the last characters of the text begin the stop."""
    most = min(len(text), len(stop) - 1)
    return next((size for size in range(most, 0, -1) if text.endswith(stop[:size])), 0)
