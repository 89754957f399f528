"""Safetensors files of a checkpoint: boxes of tensors, written by one rank and read by any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.controller.run.checksums import checksum
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.train.backend import NamedTensors
from spmd_rl.train.checkpoint.checkpoint_index import Index, SavedTensor, Shard, WrittenByRank
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Box

FILE_BYTES = 1 << 30  # a file is closed once it holds this much


def write_shards(folder: Path, rank: int, boxes: Mapping[str, NamedTensors]) -> WrittenByRank:
    """Write the boxes of one rank, whose tensors are on the CPU, to files of about a GiB.

    Raises: OSError or SafetensorError where a file cannot be written.
    """
    files: dict[str, int] = {}
    shards: dict[str, dict[str, list[Shard]]] = {kind: {} for kind in boxes}
    for kind, file, tensors in _files(rank, boxes):
        for name, shard in _write_file(folder / file, tensors):
            shards[kind].setdefault(name, []).append(shard)
        files[file] = checksum(folder / file)
    return WrittenByRank(files, shards)


def _files(rank: int, boxes: Mapping[str, NamedTensors]) -> Iterator[tuple[str, str, NamedTensors]]:
    """Yield the kind, name and tensors of each file of a rank."""
    for kind, tensors in boxes.items():
        for number, group in enumerate(_by_file(tensors)):
            yield kind, f"{kind}-{rank:05d}-{number:03d}.safetensors", group


def _write_file(path: Path, tensors: NamedTensors) -> list[tuple[str, Shard]]:
    """Write one file, and return the name of each tensor with its shard."""
    by_key = {f"{name}@{i}": (name, tensor) for i, (name, tensor) in enumerate(tensors)}
    save_file({key: tensor.local for key, (_, tensor) in by_key.items()}, path)
    return [
        (name, Shard(tensor.box.offset, tensor.box.extent, path.name, key))
        for key, (name, tensor) in by_key.items()
    ]


def _by_file(tensors: NamedTensors) -> list[list[tuple[str, LocalTensor]]]:
    """Return the tensors of each file."""
    files: list[list[tuple[str, LocalTensor]]] = []
    room = 0
    for name, tensor in tensors:
        if room <= 0:
            files.append([])
            room = FILE_BYTES
        files[-1].append((name, tensor))
        room -= tensor.local.nbytes
    return files


class ShardReader:
    """Reads boxes of tensors from the folder of a checkpoint; a context manager."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder = folder
        self._index = index
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stack.close()

    def fill(self, kind: str, name: str, target: LocalTensor) -> None:
        """Fill the memory of `target` with its box of a tensor.

        Raises: ConfigError where the checkpoint has another tensor of that name, or none; SpmdError
        where a file is not what the index says.
        """
        saved = self._saved(kind, name, target)
        for shard in saved.shards if target.box.num_elements else ():
            if (common := target.box.intersect(shard.box)) is not None:
                values = self._read(shard, saved.dtype, common)
                target.local.detach()[common.within(target.box)].copy_(values)

    def whole(self, kind: str, name: str) -> Tensor:
        """Return a whole tensor, on the CPU. Raises: as `fill`."""
        saved = self._index.tensors[kind][name]
        tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        self.fill(kind, name, LocalTensors.whole({name: tensor})[name])
        return tensor

    def _saved(self, kind: str, name: str, target: LocalTensor) -> SavedTensor:
        """Return a tensor of the index. Raises: ConfigError unless it is as `target`."""
        saved = self._index.tensors.get(kind, {}).get(name)
        if saved is None:
            raise ConfigError(f"{self._folder} is of another model: it has no {kind} of '{name}'")
        if saved.shape != target.shape or saved.dtype != target.dtype:
            raise ConfigError(
                f"{self._folder} is of another model: its {kind} of '{name}' is "
                f"{saved.dtype} {list(saved.shape)}, not {target.dtype} {list(target.shape)}"
            )
        return saved

    def _read(self, shard: Shard, dtype: str, box: Box) -> Tensor:
        try:
            stored = self._open(shard.file).get_slice(shard.key)
            if tuple(stored.get_shape()) == shard.extent:
                tensor: Tensor = stored[box.within(shard.box)]
                if tensor.dtype == getattr(torch, dtype):
                    return tensor
        except SafetensorError as error:
            raise SpmdError(
                f"{self._folder / shard.file} is not as it was written: {error}"
            ) from error
        raise SpmdError(
            f"{self._folder / shard.file} is not as it was written: '{shard.key}' is another tensor"
        )

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(
                safe_open(self._folder / file, framework="pt")
            )
        return self._files[file]
