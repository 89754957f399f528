"""Bytes of tokens, of which several may make one character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how tokens of sentencepiece write a space


class TokenBytes:
    """Bytes of each token of a tokenizer of the `tokenizers` library.

    Joined, they are the bytes of the text; a decoder may take a space from its beginning.
    """

    def __init__(self, rust: Any) -> None:
        self._rust = rust
        self._kinds = (
            set(_kinds(json.loads(rust.decoder.__getstate__()))) if rust.decoder else set()
        )
        self._added = {key: one.content for key, one in rust.get_added_tokens_decoder().items()}

    def of(self, token: int) -> bytes:
        """Return the bytes of a token id; none for an id that is not known."""
        if token in self._added:
            return str(self._added[token]).encode()
        name = self._rust.id_to_token(token)
        if name is None:
            return b""
        if "ByteLevel" in self._kinds and _letters().keys() >= {*name}:
            return bytes(map(_letters().__getitem__, name))
        if "ByteFallback" in self._kinds and (match := _ONE_BYTE.fullmatch(name)):
            return bytes.fromhex(match[1])
        if self._kinds & {"Metaspace", "Replace"}:
            return str(name).replace(_SPACE, " ").encode()
        return str(self._rust.decode([token], skip_special_tokens=False)).encode()


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    """Yield the kinds of a decoder, and of those in it."""
    yield decoder["type"]
    for one in decoder.get("decoders", ()):
        yield from _kinds(one)


@cache
def _letters() -> dict[str, int]:
    """Return the byte of each letter by which GPT-2's tokens write bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + place): byte for place, byte in enumerate(others)}
