"""Checksums of a checkpoint's files, since most readers do not notice altered bytes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.errors import SpmdError

CHUNK_BYTES = 1 << 24


def checksums(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of every file in `folder` and below, by its path relative to `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): checksum(path) for path in files}


def check(folder: Path, expected: Mapping[str, int], rank: int = 0, num_ranks: int = 1) -> None:
    """Compare the files in `folder` with their expected checksums; each of `num_ranks` ranks checks
    its share.

    Raises: SpmdError naming a file that is missing or was altered.
    """
    for name in sorted(expected)[rank::num_ranks]:
        path = folder / name
        if not path.is_file():
            raise SpmdError(f"{path} is missing: the checkpoint is not as it was written")
        if checksum(path) != expected[name]:
            raise SpmdError(f"{path} is not as it was written: its checksum is another one")


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
