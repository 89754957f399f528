"""Stop strings over a stream of tokens.

Text is decoded a short window at a time. A token may end in the middle of a character (the decoder
then shows U+FFFD at the end), and what a token reads as may depend on the one before it, so the
window begins at tokens whose text is settled. Where the text has not ended with a whole character
for many tokens, all but the newest of them are settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd_rl.rollout.engine import UNDECODED

MAX_FRESH_TOKENS = 16
MAX_UNFINISHED_TOKENS = 3  # of a character, which has at most four bytes


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
        seen = self._tail + self._text_of(self._fresh)
        hit = any(stop in seen for stop in self._stops)
        is_whole = not self._decode(self._settled + self._fresh).endswith(UNDECODED)
        if is_whole or len(self._fresh) == MAX_FRESH_TOKENS:
            self._settle(len(self._fresh) if is_whole else MAX_FRESH_TOKENS - MAX_UNFINISHED_TOKENS)
        return hit

    def _text_of(self, fresh: tuple[int, ...]) -> str:
        """What `fresh` adds to the settled text, but for bytes at its end that may become a
        character.
        """
        known = self._decode(self._settled).rstrip(UNDECODED)
        return self._decode(self._settled + fresh).rstrip(UNDECODED)[len(known) :]

    def _settle(self, count: int) -> None:
        seen = self._tail + self._text_of(self._fresh[:count])
        self._tail = seen[-self._keep :] if self._keep else ""
        self._settled, self._fresh = self._fresh[:count], self._fresh[count:]
