"""Arrays that the processes of one host share: a large payload crosses as the name of a file.

The files lie in a private folder of the host's shared memory. The controller owns all of them: it
removes a file once none of its own arrays lies in it and every call that names it has ended. So an
array crosses to each rank, and back to the controller, without a copy of its bytes in between. An
array that has crossed once is only named the next time, which needs it to be read-only. An answer
that nobody reads, after a failure, leaves its file until the run ends.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError
from spmd_rl.mesh.private_folder import PrivateFolder

# A payload from this size on is shared, and so is an array that lies in such a payload already.
SHARED_BYTES, NAMED_BYTES = 1 << 17, 1 << 12
_NAME = re.compile(r"[a-z0-9]+-[0-9]+")
_MAX_PIECES = 1024  # of one `writev`


class SharedFile:
    """A file of arrays. With `is_owned` it is removed when this object is."""

    def __init__(self, path: Path, *, is_owned: bool) -> None:
        self.name = path.name
        if is_owned:
            weakref.finalize(self, _remove, str(path), os.getpid()).atexit = False


class SharedPlace(NamedTuple):
    """Where an array lies: a file, and the offset in it in bytes."""

    file: SharedFile
    offset: int


class _Mapping(mmap.mmap):
    """A file of another process in this one's memory, for as long as an array lies in it."""

    file: SharedFile
    address: int


class SharedArrays:
    """One process's end: it writes files, and maps those that others name.

    `process` is the first part of the names of its files. A worker gives its files to the
    controller, and writes to what it maps as to memory of its own.
    """

    access = mmap.ACCESS_COPY
    owns_files = False

    def __init__(self, folder: Path, process: str) -> None:
        self.folder = folder
        self._process = process
        self._numbers = itertools.count()

    def write(self, pieces: Sequence[Any], num_bytes: int) -> SharedFile | None:
        """Write buffers end to end into a new file; None if the host has no room for it."""
        path = self.folder / f"{self._process}-{next(self._numbers)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            # Without this, memory that runs out would kill the process that writes.
            os.posix_fallocate(descriptor, 0, num_bytes)
            _write_all(descriptor, pieces)
        except OSError:
            path.unlink()
            return None
        finally:
            os.close(descriptor)
        return SharedFile(path, is_owned=self.owns_files)

    def map(self, name: str) -> _Mapping:
        """Return the bytes of a file. Raises: ContractError where there is no such file."""
        path = self.folder / name
        try:
            if not _NAME.fullmatch(name):
                raise FileNotFoundError(2, "it is no name of such a file")
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise ContractError(f"no shared arrays in {name!r}: {error.strerror}") from error
        try:
            mapping = _Mapping(descriptor, 0, access=self.access)
        finally:
            os.close(descriptor)
        mapping.file = SharedFile(path, is_owned=self.owns_files)
        mapping.address = _address(np.frombuffer(mapping, np.uint8))
        return mapping

    def place_of(self, array: NDArray[Any]) -> SharedPlace | None:
        """Return where an array lies that need not be written again."""
        return None

    def remember(self, array: NDArray[Any], file: SharedFile, offset: int) -> None:
        """Note that an array was written to a file."""


class ControllerArrays(SharedArrays):
    """The controller's end, which owns the files. What it maps is read-only."""

    access = mmap.ACCESS_READ
    owns_files = True

    def __init__(self, folder: PrivateFolder) -> None:
        super().__init__(folder.path, "controller")
        self._private_folder = folder
        self._written: dict[int, tuple[weakref.ref[Any], SharedPlace]] = {}  # by id of the array

    def close(self) -> None:
        """Remove the folder, once the workers have ended."""
        self._private_folder.leave()

    def place_of(self, array: NDArray[Any]) -> SharedPlace | None:
        if array.flags.writeable or array.nbytes < NAMED_BYTES or not array.flags.c_contiguous:
            return None
        if known := self._written.get(id(array)):
            return known[1]
        base: Any = array.base
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, _Mapping):
            return SharedPlace(base.file, _address(array) - base.address)
        return None

    def remember(self, array: NDArray[Any], file: SharedFile, offset: int) -> None:
        # A view could change with the array that it is a view of.
        if array.flags.writeable or array.base is not None or array.nbytes < NAMED_BYTES:
            return
        key = id(array)
        forget = weakref.ref(array, lambda _: self._written.pop(key, None))
        self._written[key] = forget, SharedPlace(file, offset)


class Outgoing:
    """What one message shares; `files` must live until its receivers have read it."""

    def __init__(self, shared: SharedArrays) -> None:
        self.shared = shared
        self.files: list[SharedFile] = []

    def place_of(self, array: NDArray[Any]) -> SharedPlace | None:
        """Return where an array lies already, and keep it there."""
        place = self.shared.place_of(array)
        if place is not None:
            self.files.append(place.file)
        return place

    def write(
        self, pieces: Sequence[Any], num_bytes: int, arrays: Sequence[tuple[NDArray[Any], int]]
    ) -> SharedFile | None:
        """Write a payload, in which `arrays` lie at these offsets; None if there is no room."""
        file = self.shared.write(pieces, num_bytes)
        if file is not None:
            self.files.append(file)
            for array, offset in arrays:
                self.shared.remember(array, file, offset)
        return file


def _write_all(descriptor: int, pieces: Sequence[Any]) -> None:
    left = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while left:
        written = os.writev(descriptor, left[:_MAX_PIECES])
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if written:
            left[0] = left[0][written:]


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _remove(path: str, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        with suppress(OSError):
            os.unlink(path)
