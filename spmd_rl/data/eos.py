"""Where texts end: by the ids that a model's config and its tokenizer name, or by nothing but a
limit.

Engines end a sample at any of these ids, supervised answers are learned with one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol


class Names(Protocol):
    """What a tokenizer and the config beside it say of the end."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def model_ends(self) -> tuple[int, ...]: ...


class Limits(Protocol):
    """What a sampling config says of it."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def stop_ids(self) -> Sequence[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


def end_ids(names: Names) -> tuple[int, ...]:
    """All that end a sample. The first is what a supervised answer ends with: the tokenizer's, if
    it has one.
    """
    own = () if names.eos_token_id is None else (names.eos_token_id,)
    return tuple(dict.fromkeys((*own, *names.model_ends)))


def differ(names: Names) -> str:
    """The beginning of a sentence if config and tokenizer name other ids, else nothing."""
    own, ids = names.eos_token_id, names.model_ends
    if own is None or not ids or own in ids:
        return ""
    written = " or ".join(map(str, ids))
    return f"the model's config ends a text with token {written}, its tokenizer with {own}"


def odd_samples(
    names: Names, limits: Limits, context: int, lengths: Sequence[int], path: str
) -> Iterator[str]:
    """What is to be told of samples of prompts of these lengths: a line for each way in which they
    may be cut.
    """
    if not limits.ignore_eos and (sentence := differ(names)):
        yield f"{sentence}: samples end with either"
    stops = limits.ignore_eos or limits.stop or limits.stop_ids or end_ids(names)
    if not stops:
        advice = f"every sample goes on to sampling.max_tokens = {limits.max_tokens}"
        yield f"this model has no end-of-text token, and there is no sampling.stop or sampling.stop_ids: {advice}"
    if num_long := sum(length + limits.max_tokens > context for length in lengths):
        of_all = (
            f"{num_long} of {len(lengths)} prompts and sampling.max_tokens = {limits.max_tokens}"
        )
        yield f"{path}: {of_all} are more than the model's context of {context}: their samples are cut there"
