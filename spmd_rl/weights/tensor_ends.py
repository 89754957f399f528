"""TensorSource and TensorSink: ends of a push over ordinary tensors of this process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box, Layout, Piece
from spmd_rl.weights.proof.digest import MODULUS, BoxSums


def do_nothing() -> None: ...


NamedPieces = Iterable[tuple[str, LocalTensor]]


class LocalPieces:
    """The pieces of one rank. A name may have several, with different boxes."""

    def __init__(self, tensors: NamedPieces) -> None:
        self._by_name: dict[str, list[LocalTensor]] = defaultdict(list)
        for name, tensor in tensors:
            self._by_name[name].append(tensor)

    def named(self) -> Iterator[tuple[str, LocalTensor]]:
        return ((name, piece) for name, pieces in self._by_name.items() for piece in pieces)

    def layout(self, rank: int) -> Layout:
        return Layout(rank, tuple(one.piece(name) for name, one in self.named()))

    def find(self, name: str, box: Box) -> LocalTensor:
        """Return the piece that `box` is a part of."""
        for piece in self._by_name[name]:
            if piece.box == box or piece.box.intersect(box) == box:
                return piece
        raise ValueError(f"no piece of '{name}' on this rank holds {box}")

    def memory(self, name: str, box: Box) -> Tensor:
        """Return the memory of `box`, a part of a piece."""
        piece = self.find(name, box)
        memory = piece.local.detach()
        return memory if piece.box == box else memory[box.within(piece.box)]


class LazyTensor(NamedTuple):
    """A piece that is made whenever it is read, so that it takes no memory.

    `write` writes a part of it to a tensor.
    """

    piece: Piece
    write: Callable[[Box, Tensor], object]


class TensorSource:
    """Implements `ends.WeightSource` over the memory that a trainer updates in place.

    `on_open` is called before each push. Pieces of `lazy` are made of that memory on the way.
    """

    def __init__(
        self,
        tensors: NamedPieces,
        on_open: Callable[[], None] = do_nothing,
        lazy: Iterable[LazyTensor] = (),
    ) -> None:
        self._pieces = LocalPieces(tensors)
        self._lazy = {one.piece.name: one for one in lazy}
        self.open = on_open

    def layout(self, rank: int) -> Layout:
        lazy = (one.piece for one in self._lazy.values())
        return Layout(rank, (*self._pieces.layout(rank).pieces, *lazy))

    def view(self, name: str, box: Box) -> Tensor | None:
        return None if name in self._lazy else self._pieces.memory(name, box)

    @torch.no_grad()
    def read(self, name: str, box: Box, out: Tensor) -> None:
        if name in self._lazy:
            self._lazy[name].write(box, out)
        else:
            out.copy_(self._pieces.memory(name, box))


class TensorSink:
    """Implements `ends.WeightSink` over an engine's own parameters, which keep their addresses.

    `on_open` and `on_commit` tell the engine when its weights change, and their new version.
    `on_outdate` tells it that shared memory changes; it defaults to `on_open`.
    """

    def __init__(
        self,
        tensors: NamedPieces,
        on_open: Callable[[], None],
        on_commit: Callable[[int], None],
        on_outdate: Callable[[], None] | None = None,
    ) -> None:
        self._pieces = LocalPieces(tensors)
        self._on_open, self._on_commit = on_open, on_commit
        self.outdate = on_outdate or on_open
        self._shared: set[tuple[str, Box]] = set()
        self._sums: BoxSums | None = None  # of the pieces that are not shared

    def layout(self, rank: int) -> Layout:
        return self._pieces.layout(rank)

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        """Point the parameter at `memory`, if it has the same box, dtype and device."""
        piece = self._pieces.find(name, box)
        own = piece.local
        if piece.box != box or (own.dtype, own.device) != (memory.dtype, memory.device):
            return False
        own.data = memory
        self._shared.add((name, box))
        self._sums = None
        return True

    def open(self) -> None:
        self._on_open()

    def slot(self, name: str, box: Box) -> Tensor | None:
        return self._pieces.memory(name, box)

    def cut(self, name: str, box: Box) -> Iterable[Box]:
        return [box]

    def flush(self) -> int:
        return 0

    def repeat(self, slots: int) -> bool:
        """Return True: every slot is memory of a parameter."""
        return True

    def digest(self) -> dict[tuple[str, Box], int]:
        named = [
            (name, piece)
            for name, piece in self._pieces.named()
            if (name, piece.box) not in self._shared
        ]
        if self._sums is None:
            pieces = [piece for _, piece in named]
            self._sums = BoxSums(pieces, [piece.dtype for piece in pieces])
        sums = self._sums.run().tolist()
        return {
            (name, piece.box): s % MODULUS for (name, piece), s in zip(named, sums, strict=True)
        }

    def commit(self, version: int) -> None:
        self._on_commit(version)


class CopyingSink(TensorSink):
    """A `TensorSink` that never shares memory: its weights stay as they are between pushes."""

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        return False
