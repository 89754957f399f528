"""Disk cache: content by name, in a folder that only this user can enter.

What is read may be machine code, which runs with the user's rights. So the folder must be this
user's with mode 0700, and so must be each file, a regular one of mode 0600 with one name. A
symbolic link is not followed. Whatever fails, the caller goes on without the cache, with a warning.

Several processes may read and write at once: a file appears whole, under its name, or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import warnings
from functools import cache
from pathlib import Path

FOLDER_ENV = "SPMD_RL_CACHE_DIR"
DIGEST_BYTES = 32  # a file begins with the SHA-256 of the rest
OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class DiskCache:
    """The files of one folder, which is made if it is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None
        try:
            self._descriptor = _open_private_folder(folder)
        except OSError as error:
            self._warn(f"kernels are compiled anew, as the cache {folder} is not used", error)

    def private_folder(self, name: str) -> Path | None:
        """Return a folder for a library's own cache, which only this user can enter.

        It is None where this cache is not used.
        """
        return None if self._descriptor is None else self.folder / name

    def read(self, name: str) -> bytes | None:
        """Return the content under `name`, or None where there is none that can be trusted."""
        if self._descriptor is None:
            return None
        try:
            content = _read_private_file(name, self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{self.folder / name} is not used", error)
            return None
        digest, content = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            self._warn(f"{self.folder / name} is not used", OSError(0, "it is damaged"))
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Put `content` under `name`, in place of what is there."""
        if self._descriptor is None:
            return
        partial = f".{name}.{secrets.token_hex(8)}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS
            with open(os.open(partial, flags, 0o600, dir_fd=self._descriptor), "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.rename(partial, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except OSError as error:
            self._warn(f"{self.folder / name} is not kept", error)
            with contextlib.suppress(OSError):
                os.unlink(partial, dir_fd=self._descriptor)

    def _warn(self, consequence: str, error: OSError) -> None:
        warnings.warn(
            f"{consequence} ({error.strerror}): remove it, or name another folder in {FOLDER_ENV}",
            stacklevel=3,
        )


@cache
def user_cache() -> DiskCache | None:
    """Return this user's cache, or None where `SPMD_RL_CACHE_DIR` is set to nothing."""
    folder = os.environ.get(FOLDER_ENV)
    if folder is not None:
        return DiskCache(Path(folder).expanduser().absolute()) if folder else None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return DiskCache(Path(home).absolute() / "spmd_rl")


def cache_name(kind: str, *key: object) -> str:
    """Return the name of the content of a kind that belongs to `key`, equal in all processes.

    Raises: TypeError for a key with other parts than plain values, types and tuples of these.
    """
    return f"{kind}-{hashlib.sha256(_text(key).encode()).hexdigest()}"


def _text(part: object) -> str:
    if isinstance(part, tuple):
        return f"({','.join(map(_text, part))})"
    if isinstance(part, type):
        return f"<{part.__module__}.{part.__qualname__}>"
    if part is None or type(part) in (bool, int, float, str, bytes):
        return repr(part)
    raise TypeError(f"{type(part).__name__} is no part of a cache's key")


def _open_private_folder(folder: Path) -> int:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise PermissionError(0, "its owner is not this user, or its mode is not 0700")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _read_private_file(name: str, folder: int) -> bytes:
    with open(os.open(name, os.O_RDONLY | OPEN_FLAGS, dir_fd=folder), "rb") as file:
        status = os.fstat(file.fileno())
        is_private = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o600
        # a file without a name has just been replaced
        if not (is_private and stat.S_ISREG(status.st_mode) and status.st_nlink <= 1):
            raise PermissionError(0, "it is no file of mode 0600 that belongs to this user alone")
        return file.read()
