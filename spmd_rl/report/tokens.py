"""What each token of an answer says, so that it can be coloured by its log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


def find_tokenizer(run: Path, config: dict[str, Any]) -> Any | None:
    """The tokenizer of the exported model, or of the model the config names; None if neither is at
    hand.
    """
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
            except Exception:  # noqa: BLE001  not installed or a broken file: the page is made without token texts
                return None
    return None


def pieces(tokenizer: Any | None, tokens: Sequence[int], text: str) -> tuple[list[str], bool]:
    """The text of each token, and whether that is known; if not, `text` is cut into as many parts
    of even length.

    A character made of several tokens belongs to the last of them; the others are empty.
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
    except Exception:  # noqa: BLE001  the Rust library raises plain Exception for ids it cannot follow
        return None
