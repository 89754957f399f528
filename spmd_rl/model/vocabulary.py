"""Comparison of two models' vocabularies: distillation needs one id to be one token in both."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.tokenizer import load_tokenizer


def check_same_vocabulary(model: str, teacher: str) -> None:
    """Raise ConfigError, with the first difference, unless both folders have one vocabulary."""
    own, other = load_tokenizer(model).vocabulary(), load_tokenizer(teacher).vocabulary()
    if own == other:
        return
    first = min(
        (token for token in own.keys() | other.keys() if own.get(token) != other.get(token)),
        key=lambda token: (own.get(token, other.get(token, 0)), token),
    )
    raise ConfigError(
        f"the teacher {teacher} has another tokenizer than the model {model}: the token {first!r} "
        f"is {_id_text(other, first)} there and {_id_text(own, first)} here; choose a teacher of "
        "the same family"
    )


def _id_text(vocabulary: dict[str, int], token: str) -> str:
    return str(vocabulary[token]) if token in vocabulary else "missing"
