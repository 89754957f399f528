"""Tokens that a tokenizer puts in front of a text, of which a text needs one set alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_TEXT = "a"


class Encoder(Protocol):
    """The part of a tokenizer that makes tokens of texts."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...


def beginning(tokenizer: Encoder) -> list[int]:
    """Return what the tokenizer puts in front of every text, such as a BOS token."""
    (plain,) = tokenizer([_TEXT], add_special_tokens=False)["input_ids"]
    (whole,) = tokenizer([_TEXT], add_special_tokens=True)["input_ids"]
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return list(whole[: next(starts, 0)])


def begun_once(tokens: Sequence[int], beginning: list[int]) -> list[int]:
    """Return tokens of a text without a second beginning, which the text has itself.

    That is a text which was rendered before, such as "<s>Hello".
    """
    size = len(beginning)
    while size and list(tokens[size : 2 * size]) == beginning:
        tokens = tokens[size:]
    return list(tokens)
