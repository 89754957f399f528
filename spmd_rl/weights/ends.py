"""Ends of a push on one rank: the protocols of its source and of its sink.

A push reads boxes from sources and puts them into sinks. A sink either lets the source's memory be
its own (`share`), or says where bytes are to be put (`slot`). A sink of portions has room for some
boxes at a time, and makes room in `flush`.

    sink.open()
    for each box:  slot = sink.slot(...)   None: sink.flush(), then slot again, else sink.write(...)
                   slot.copy_(source.view(...))   or source.read(..., out=slot)
    sink.flush();  sink.digest() beside the source's;  sink.commit(version)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from spmd_rl.weights.plan.layout import Box, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Shared = frozenset[tuple[str, Box]]  # the pieces of a sink that are the memory of its source


class WeightSource(Protocol):
    """One rank's share of the weights that are pushed."""

    def layout(self, rank: int) -> Layout:
        """Return the pieces that this rank, `rank` of the world, can give."""
        ...

    def open(self) -> None:
        """Note that a push begins to read. Raises: ResidencyError while the weights sleep."""
        ...

    def view(self, name: str, box: Box) -> Tensor | None:
        """Return the memory of `box`, a part of a piece; None where `read` has to make it.

        It is the same memory at every push.
        """
        ...

    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Write `box` to `out`, cast to its dtype. It communicates with no other rank."""
        ...


class WeightSink(Protocol):
    """One rank's share of the weights that a push replaces."""

    def layout(self, rank: int) -> Layout:
        """Return the pieces that a push has to fill on this rank, `rank` of the world."""
        ...

    def share(self, name: str, box: Box, memory: Tensor) -> bool:
        """Use `memory` as this piece from now on; return False if it has to have its own."""
        ...

    def outdate(self) -> None:
        """Note that memory which is shared with the source is about to change: nothing is generated
        until the next push.
        """
        ...

    def open(self) -> None:
        """Note that the weights change: nothing is generated until `commit`. It is idempotent."""
        ...

    def slot(self, name: str, box: Box) -> Tensor | None:
        """Return where the bytes of `box` are to be put; None while there is no room."""
        ...

    def cut(self, name: str, box: Box) -> Iterable[Box]:
        """Return smaller boxes that together are `box`, which had no slot even after a `flush`.

        Each of them has one.
        """
        ...

    def flush(self) -> int | None:
        """Use all slots given so far: they hold their bytes, or do on the current CUDA stream.

        Return a number for `repeat`; None where the same slots cannot be given again.
        """
        ...

    def repeat(self, slots: int) -> bool:
        """Give all slots of an earlier `flush`, which returned `slots`, again and in their order.

        Return False, and give none, where a box might have another slot now.
        """
        ...

    def digest(self) -> dict[tuple[str, Box], int]:
        """Return the digest of each piece as the engine has it now (digest.py).

        It is called between the last `flush` and `commit`. Shared pieces, and those that cannot be
        digested, are left out.
        """
        ...

    def commit(self, version: int) -> None:
        """Generate with the new weights, as `version`: every rank has them."""
        ...


@dataclass(frozen=True)
class LocalEnds:
    """The ends of a push in this process, which is `rank` of the world and may have one or both.

    `shared` are the pieces that are the same memory at both ends. Buckets are on `device`.
    """

    rank: int
    source: WeightSource | None
    sink: WeightSink | None
    device: torch.device
    shared: Shared = frozenset()

    def the_source(self) -> WeightSource:
        if self.source is None:
            raise ValueError(f"the plan reads weights on rank {self.rank}, which has no source")
        return self.source

    def the_sink(self) -> WeightSink:
        if self.sink is None:
            raise ValueError(f"the plan writes weights on rank {self.rank}, which has no sink")
        return self.sink
