"""Boxes of tensors in safetensors files: written by one rank, read by any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from spmd_rl.train.checkpoint_index import Index, SavedTensor, Shard, Written
from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensor

FILE_BYTES = 1 << 30  # a file is closed once it holds this much


def write_shards(
    folder: Path, rank: int, boxes: Mapping[str, Sequence[tuple[str, LocalTensor]]]
) -> Written:
    """Write the boxes of one rank, whose tensors are on the CPU, to files of about a GiB.

    Raises: OSError or SafetensorError, which says why, where the system does not take them.
    """
    files: dict[str, int] = {}
    shards: dict[str, dict[str, list[Shard]]] = {}
    for kind, held in boxes.items():
        shards[kind] = {}
        for number, batch in enumerate(_batches(held)):
            file = f"{kind}-{rank:05d}-{number:03d}.safetensors"
            keys = [f"{name}@{position}" for position, (name, _) in enumerate(batch)]
            save_file(
                {key: one.local for key, (_, one) in zip(keys, batch, strict=True)}, folder / file
            )
            files[file] = checksum(folder / file)
            for key, (name, one) in zip(keys, batch, strict=True):
                shards[kind].setdefault(name, []).append(
                    Shard(one.box.offset, one.box.extent, file, key)
                )
    return Written(files, shards)


def _batches(held: Sequence[tuple[str, LocalTensor]]) -> list[list[tuple[str, LocalTensor]]]:
    """What goes into each file."""
    batches: list[list[tuple[str, LocalTensor]]] = []
    room = 0
    for name, one in held:
        if room <= 0:
            batches.append([])
            room = FILE_BYTES
        batches[-1].append((name, one))
        room -= one.local.nbytes
    return batches


class ShardReader:
    """Reads boxes of the tensors in a checkpoint's folder. A context manager: it holds the files
    that it has opened.
    """

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

    def fill(self, kind: str, name: str, held: LocalTensor) -> None:
        """Fill the memory of `held` with its box of a tensor.

        Raises: ConfigError where the checkpoint has another tensor of that name, or none; SpmdError
        where a file is not what the index says.
        """
        saved = self._index.tensors.get(kind, {}).get(name)
        if saved is None:
            raise ConfigError(f"{self._folder} is of another model: it has no {kind} of '{name}'")
        if saved.shape != held.shape or saved.dtype != held.dtype:
            theirs, ours = (f"{dtype} {list(shape)}" for dtype, shape in _both(saved, held))
            raise ConfigError(
                f"{self._folder} is of another model: its {kind} of '{name}' is {theirs}, not {ours}"
            )
        for shard in saved.shards if held.box.num_elements else ():
            if (common := held.box.intersect(shard.box)) is not None:
                held.local.detach()[common.within(held.box)].copy_(
                    self._read(shard, saved.dtype, common)
                )

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole tensor, on the CPU. Raises: as `fill`."""
        saved = self._index.tensors[kind][name]
        tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        self.fill(
            kind, name, LocalTensor(saved.shape, Box((0,) * len(saved.shape), saved.shape), tensor)
        )
        return tensor

    def _read(self, shard: Shard, dtype: str, box: Box) -> Tensor:
        try:
            found = self._open(shard.file).get_slice(shard.key)
            if tuple(found.get_shape()) == shard.extent:
                tensor: Tensor = found[box.within(shard.box)]
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


def _both(
    saved: SavedTensor, held: LocalTensor
) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    return (saved.dtype, saved.shape), (held.dtype, held.shape)
