"""Matching of stop strings against a stream of tokens.

Only a short window of tokens is decoded at a time. A token may end in the middle of a character;
the decoder then shows U+FFFD at the end. The text of a token may also depend on the token before
it. So the window begins at tokens whose text is settled. If many tokens in a row end within a
character, all but the newest of them are settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmd_rl.rollout.engine import UNDECODED

MAX_UNSETTLED_TOKENS = 16
MAX_CHARACTER_TOKENS = 3  # tokens of an unfinished character, which has at most four bytes


class StopStringMatcher:
    """Finds the first token after which one of `stops` is in the text.

    Its state is a function of the tokens pushed.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[tuple[int, ...]], str]) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tail_length = max(map(len, stops)) - 1
        self._tail = ""  # the end of the text before the unsettled tokens
        self._settled: tuple[int, ...] = ()
        self._unsettled: tuple[int, ...] = ()

    def push(self, token: int) -> bool:
        """Return whether the text up to `token` ends with, or just after, a stop string."""
        self._unsettled += (token,)
        text = self._tail + self._text_of(self._unsettled)
        is_hit = any(stop in text for stop in self._stops)
        is_whole = not self._decode(self._settled + self._unsettled).endswith(UNDECODED)
        if is_whole:
            self._settle(len(self._unsettled))
        elif len(self._unsettled) == MAX_UNSETTLED_TOKENS:
            self._settle(MAX_UNSETTLED_TOKENS - MAX_CHARACTER_TOKENS)
        return is_hit

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        """Return what `tokens` add to the settled text.

        Bytes at the end that may still become a character are left out.
        """
        settled = self._decode(self._settled).rstrip(UNDECODED)
        return self._decode(self._settled + tokens).rstrip(UNDECODED)[len(settled) :]

    def _settle(self, count: int) -> None:
        text = self._tail + self._text_of(self._unsettled[:count])
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        self._settled, self._unsettled = self._unsettled[:count], self._unsettled[count:]
