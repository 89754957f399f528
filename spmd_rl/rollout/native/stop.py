"""Stop strings over a stream of tokens.

Text is decoded a short window at a time. A token may end in the middle of a character (the decoder then shows U+FFFD
at the end), and what a token reads as may depend on the one before it, so the window begins at tokens whose text is
settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
MAX_FRESH_TOKENS = 16


class StopStrings:
    """Says after which token one of `stops` is there. Its state is a function of the tokens pushed."""

    def __init__(self, stops: Sequence[str], decode: Callable[[tuple[int, ...]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._keep = max(map(len, stops)) - 1
        self._tail = ""
        self._settled: tuple[int, ...] = ()
        self._fresh: tuple[int, ...] = ()

    def push(self, token: int) -> bool:
        """True where the text up to `token` ends with, or just after, a stop string."""
        self._fresh += (token,)
        settled = self._decode(self._settled)
        text = self._decode(self._settled + self._fresh)
        whole = text.rstrip(UNFINISHED)
        seen = self._tail + whole[len(settled) :]
        hit = any(stop in seen for stop in self._stops)
        if whole == text or len(self._fresh) == MAX_FRESH_TOKENS:
            self._tail = seen[-self._keep :] if self._keep else ""
            self._settled, self._fresh = self._fresh, ()
        return hit
