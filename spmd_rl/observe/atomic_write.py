"""Atomic writes: a file or folder has its name only once it is complete.

Nothing here follows a symbolic link that has the name of the target.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def errors_naming_file(path: Path) -> Iterator[None]:
    """Add the path to an OSError from the body: a write to a full disk does not name its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, and rename it to `path` when the body ends without an error.

    Until then the file has an unguessable name. An existing file or link at `path` is replaced.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with errors_naming_file(path):
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with open(descriptor, "wb") as file:
                yield file
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path`, which is never seen half-written."""
    with atomic_file(path) as file:
        file.write(text.encode())


def open_append(path: Path, buffering: int = -1) -> BinaryIO:
    """Open `path` itself for appending. Raises: OSError when it is a symbolic link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    return open(descriptor, "ab", buffering)


def part_folder(target: Path) -> Path:
    """Return the folder in which `target` is written before it is complete."""
    return target.with_name(f".{target.name}.part")


def begin_folder(target: Path) -> Path:
    """Make an empty `part_folder` for `target`, after removing that of an earlier attempt."""
    part = part_folder(target)
    remove_folder(part)
    part.mkdir(parents=True)
    return part


def finish_folder(target: Path) -> None:
    """Rename the part folder to `target`. An existing folder of that name is replaced."""
    old = target.with_name(f".{target.name}.old")
    remove_folder(old)
    if target.exists():
        os.rename(target, old)
    os.rename(part_folder(target), target)
    remove_folder(old)


def remove_folder(path: Path) -> None:
    """Remove a folder with its contents, or just the link or file. Does nothing if absent."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
