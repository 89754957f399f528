"""Tokenizer of a model, and what it puts in front of a text, which needs only one of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_TEXT = "a"


class Tokenizer(Protocol):
    """The part of a model's tokenizer that data needs, with the interface of transformers."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def config_eos_ids(self) -> tuple[int, ...]: ...  # those of the model's config beside it

    @property
    def chat_template(self) -> Any: ...  # a text, or several by name; None without any

    @property
    def context(self) -> int: ...  # how many tokens the model can take

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any: ...

    def num_tokens(self, text: str) -> int: ...  # with special ones; a process that forks may ask

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


def beginning(tokenizer: Tokenizer) -> list[int]:
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
