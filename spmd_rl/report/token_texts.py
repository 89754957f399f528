"""Texts of the single tokens of a response, so that each can be coloured by its log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def find_tokenizer(run: Path, config: dict[str, Any]) -> Any | None:
    """Return the tokenizer of the exported model or of the config's model, None without either."""
    models = [
        value
        for key, value in config.items()
        if key.rpartition(".")[2] == "model" and isinstance(value, str)
    ]
    for folder in [run / "hf", *map(Path, filter(None, models))]:
        file = folder / "tokenizer.json"
        if file.is_file():
            try:
                from tokenizers import Tokenizer

                return Tokenizer.from_file(str(file))
            except Exception:  # noqa: BLE001  not installed, or a damaged file: the page has no token texts
                return None
    return None


def token_texts(tokenizer: Any | None, tokens: Sequence[int], text: str) -> tuple[list[str], bool]:
    """Return the text of each token, and whether it is known.

    If not, `text` is cut into parts of equal length. A character of several tokens belongs to the
    last of them, and the others are empty.
    """
    if tokenizer is not None:
        decoded = _decoded(tokenizer, tokens)
        if decoded is not None and text.strip() in "".join(decoded):
            return decoded, True
    edges = [i * len(text) // len(tokens) for i in range(len(tokens))] + [len(text)]
    return [text[a:b] for a, b in pairwise(edges)] or [text], False


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> list[str] | None:
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer, token) or "" for token in tokens]
    except Exception:  # noqa: BLE001  the Rust library raises a plain Exception for unknown ids
        return None
