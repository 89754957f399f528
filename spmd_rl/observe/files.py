"""Writing files that are whole from the moment they appear, and never through a symbolic link."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, which knows it when a file is opened, not when the
    disk is full.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the name `path`, and the place of what has it, once the block is left
    without an error.

    Until then it has a name that nobody can have guessed. A link of the name `path` is replaced,
    not followed.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with naming(path):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with open(descriptor, "wb") as file:
                yield file
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` so that `path` is never seen half-written."""
    with whole_file(path) as file:
        file.write(text.encode())


def open_to_append(path: Path, buffering: int = -1) -> BinaryIO:
    """`path` itself, to write at its end. Raises: OSError when it is a symbolic link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return open(descriptor, "ab", buffering)
