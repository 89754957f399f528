"""LocalTensors: the tensors, or shards of them, that a rank holds, under their canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from spmd_rl.weights.plan.layout import Box, Dims, Layout, Piece, whole_box


@dataclass(frozen=True)
class LocalTensor:
    """One rank's box of a tensor with global `shape`. `local` is the memory itself: a parameter, or
    a view of one.
    """

    shape: Dims
    box: Box
    local: Tensor

    @property
    def dtype(self) -> str:
        return str(self.local.dtype).removeprefix("torch.")

    def piece(self, name: str) -> Piece:
        """Return what this is as plain data."""
        return Piece(name, self.shape, self.dtype, self.box)


class LocalTensors(Mapping[str, LocalTensor]):
    """The local tensors of one rank by canonical name."""

    def __init__(self, tensors: Mapping[str, LocalTensor]) -> None:
        for name, tensor in tensors.items():
            shape, extent = tuple(tensor.local.shape), tensor.box.extent
            if shape != extent:
                raise ValueError(
                    f"'{name}': a local tensor of {shape} cannot hold a box of {extent}"
                )
        self._tensors = dict(tensors)

    @classmethod
    def whole(cls, named: Mapping[str, Tensor]) -> LocalTensors:
        """Wrap parameters that this rank holds in full, as an engine does."""
        shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
        return cls(
            {name: LocalTensor(one, whole_box(one), named[name]) for name, one in shapes.items()}
        )

    def __getitem__(self, name: str) -> LocalTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def layout(self, rank: int) -> Layout:
        """Describe these tensors as plain data; `rank` is this process's rank in the world."""
        return Layout(rank, tuple(tensor.piece(name) for name, tensor in self.items()))
