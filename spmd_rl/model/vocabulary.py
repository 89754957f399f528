"""Comparison of two models' vocabularies: a teacher or reward model reads the policy's ids."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.tokenizer import load_tokenizer


def check_same_vocabulary(model: str, other: str) -> None:
    """Raise ConfigError, with the first difference, unless both folders have one vocabulary."""
    own, its = load_tokenizer(model).get_vocab(), load_tokenizer(other).get_vocab()
    if own == its:
        return
    first = min(
        (token for token in own.keys() | its.keys() if own.get(token) != its.get(token)),
        key=lambda token: (own.get(token, its.get(token, 0)), token),
    )
    raise ConfigError(
        f"{other} has another tokenizer than the model {model}: the token {first!r} is "
        f"{_id_text(its, first)} there and {_id_text(own, first)} here; choose a model of the same "
        "family"
    )


def _id_text(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "missing"
