"""Keys of sessions: made at random, and found in a request.

A key is looked up by its digest, so how long that takes tells nothing of the keys that are known.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import sha256
from typing import Generic, TypeVar

T = TypeVar("T")

KEY_BYTES = 32
MAX_KEY = 256  # characters of what a client may send as a key


def new_key() -> str:
    """Return a key of 256 random bits, which may stand in a URL."""
    return "sk-" + secrets.token_urlsafe(KEY_BYTES)


def key_of(path_key: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the key of a request, or "".

    A key in the path goes before one in the headers, as clients always send some key.
    """
    if path_key:
        return path_key
    bearer = named = ""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            bearer = value[7:].decode("latin-1").strip()
        elif name == b"x-api-key":
            named = value.decode("latin-1").strip()
    return named or bearer


class KeyTable(Generic[T]):
    """What belongs to each key. Only digests of keys are kept."""

    def __init__(self) -> None:
        self._held: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: str, value: T) -> None:
        self._held[_digest(key)] = value

    def remove(self, key: str) -> None:
        self._held.pop(_digest(key), None)

    def find(self, key: str) -> T | None:
        """Return what belongs to a key; None for a key that is not known."""
        if not key or len(key) > MAX_KEY:
            return None
        return self._held.get(_digest(key))

    def values(self) -> list[T]:
        return list(self._held.values())


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "replace")).digest()
