"""The tensors a rank holds, under their canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from spmd_rl.weights.layout import Box, Dims, Layout, Piece


@dataclass(frozen=True)
class LocalTensor:
    """`local` is the memory itself (a parameter, or a view of one), holding `box` of a tensor of
    global `shape`.
    """

    shape: Dims
    box: Box
    local: Tensor

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")


class LocalTensors(Mapping[str, LocalTensor]):
    """Canonical name -> what this rank holds of it."""

    def __init__(self, tensors: Mapping[str, LocalTensor]) -> None:
        for name, held in tensors.items():
            if tuple(held.local.shape) != held.box.extent:
                raise ValueError(
                    f"'{name}': a local tensor of {tuple(held.local.shape)} cannot hold a box of {held.box.extent}"
                )
        self._tensors = dict(tensors)

    @classmethod
    def whole(cls, named: Mapping[str, Tensor]) -> LocalTensors:
        """Tensors that this rank holds in full, as an engine does. Give the parameters themselves."""
        return cls(
            {
                name: LocalTensor(tuple(t.shape), Box((0,) * t.dim(), tuple(t.shape)), t)
                for name, t in named.items()
            }
        )

    def __getitem__(self, name: str) -> LocalTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def layout(self, rank: int) -> Layout:
        """What is held, as plain data; `rank` is this process's rank in the world."""
        return Layout(
            rank,
            tuple(Piece(name, held.shape, held.dtype, held.box) for name, held in self.items()),
        )
