"""Checksums of a checkpoint's files: DCP's own reader takes a shard with altered bytes for one that is whole."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.errors import SpmdError

CHUNK_BYTES = 1 << 24


def checksums(folder: Path) -> dict[str, int]:
    """The CRC-32 of every file in `folder`, by name."""
    return {path.name: _checksum(path) for path in sorted(folder.iterdir())}


def check(folder: Path, expected: Mapping[str, int], rank: int, num_ranks: int) -> None:
    """Raises: SpmdError naming a file that is not as it was written. Each of `num_ranks` looks at its share."""
    for name in sorted(expected)[rank::num_ranks]:
        path = folder / name
        if not path.is_file():
            raise SpmdError(f"{path} is missing: the checkpoint is not as it was written")
        if _checksum(path) != expected[name]:
            raise SpmdError(f"{path} is not as it was written: its checksum is another one")


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
