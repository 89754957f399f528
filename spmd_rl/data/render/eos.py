"""End-of-text tokens: the ids that a model's config and its tokenizer name.

Engines end a sample at any of these ids. Supervised answers are learned with the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from spmd_rl.data.render.tokenizer import Tokenizer


class StopConditions(Protocol):
    """The settings of a sampling config that end a sample."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def stop(self) -> Sequence[str]: ...

    @property
    def stop_ids(self) -> Sequence[int]: ...

    @property
    def ignore_eos(self) -> bool: ...


def eos_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return all ids that end a sample, the tokenizer's own first if it has one."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return tuple(dict.fromkeys((*own, *tokenizer.config_eos_ids)))


def eos_disagreement(tokenizer: Tokenizer) -> str:
    """Return a clause that names both ids if config and tokenizer disagree, else ""."""
    own, config_ids = tokenizer.eos_token_id, tokenizer.config_eos_ids
    if own is None or not config_ids or own in config_ids:
        return ""
    written = " or ".join(map(str, config_ids))
    return f"the model's config ends a text with token {written}, its tokenizer with {own}"


def sampling_warnings(
    tokenizer: Tokenizer,
    stops: StopConditions,
    prompt_lengths: Sequence[int],
    path: str,
) -> Iterator[str]:
    """Yield a sentence for each way in which samples of these prompts may be cut."""
    if not stops.ignore_eos and (sentence := eos_disagreement(tokenizer)):
        yield f"{sentence}: samples end with either"
    if not (stops.ignore_eos or stops.stop or stops.stop_ids or eos_ids(tokenizer)):
        yield (
            "this model has no end-of-text token, and neither sampling.stop nor sampling.stop_ids "
            f"is set: every sample goes on to sampling.max_tokens = {stops.max_tokens}"
        )
    num_long = sum(length + stops.max_tokens > tokenizer.context for length in prompt_lengths)
    if num_long:
        yield (
            f"{path}: {num_long} of {len(prompt_lengths)} prompts with sampling.max_tokens = "
            f"{stops.max_tokens} exceed the model's context of {tokenizer.context}: their samples "
            "are cut there"
        )
