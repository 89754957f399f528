"""PerturbedSource: a source that gives wrong bits, to see that a comparison finds them."""

from __future__ import annotations

from torch import Tensor

from spmd_rl.weights.ends import WeightSource
from spmd_rl.weights.plan.layout import Box, Layout
from spmd_rl.weights.proof.digest import BITS


class PerturbedSource:
    """Gives the boxes of another source, each with the lowest bit of its first element flipped."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def layout(self, rank: int) -> Layout:
        return self._source.layout(rank)

    def open(self) -> None:
        self._source.open()

    def view(self, name: str, box: Box) -> Tensor | None:
        return None

    def read(self, name: str, box: Box, out: Tensor) -> None:
        self._source.read(name, box, out)
        flip_lowest_bit(out)


def flip_lowest_bit(tensor: Tensor) -> None:
    """Flip the lowest bit of the first element, in place."""
    if tensor.numel():
        first = tensor[(0,) * tensor.dim()]
        first.view(BITS[tensor.element_size()]).bitwise_xor_(1)
