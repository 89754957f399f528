"""CodedSource: the source of a push that moves the codes and scales of weights in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.model.low_precision.coded_weights import scale_name
from spmd_rl.train.fsdp2.coded_masters import CodedMasters
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Layout, Piece
from spmd_rl.weights.tensor_ends import TensorSource


class CodedSource:
    """Implements `ends.WeightSource` over this rank's rows of the master weights.

    Codes are made when they are read, so that they take no memory. Every rank has all scales.
    """

    def __init__(
        self, weights: LocalTensors, coded: CodedMasters, on_open: Callable[[], None]
    ) -> None:
        self._coded = coded
        self._plain = TensorSource(weights.items(), on_open)
        self._weight_of = {scale_name(name): name for name in coded.scales}
        self.open = self._plain.open

    def layout(self, rank: int) -> Layout:
        return Layout(rank, tuple(self._pieces(rank)))

    def view(self, name: str, box: Box) -> Tensor | None:
        is_made = name in self._coded.scales or name in self._weight_of
        return None if is_made else self._plain.view(name, box)

    @torch.no_grad()
    def read(self, name: str, box: Box, out: Tensor) -> None:
        """Write `box` to `out`. All columns of its rows are made."""
        if name in self._weight_of:
            scales = self._coded.scales[self._weight_of[name]]
            out.copy_(scales[box.within(_whole(scales))])
        elif name in self._coded.scales:
            held, (first, column) = self._coded.shards[name], box.offset
            values = held.local.detach().narrow(0, first - held.box.offset[0], box.extent[0])
            scales, own = self._coded.scales[name], self._coded.format
            if box.extent[1] == own.layout.code_shape(tuple(values.shape))[1]:
                own.encode(values, scales, first, out)
            else:
                out.copy_(own.encode(values, scales, first).narrow(1, column, box.extent[1]))
        else:
            self._plain.read(name, box, out)

    def _pieces(self, rank: int) -> Iterator[Piece]:
        for piece in self._plain.layout(rank).pieces:
            scales = self._coded.scales.get(piece.name)
            if scales is None:
                yield piece
                continue
            layout, box = self._coded.format.layout, _whole(scales)
            shape = layout.code_shape(piece.shape)
            rows = Box(piece.box.offset, (piece.box.extent[0], shape[1]))
            yield replace(piece, shape=shape, dtype=layout.code_dtype, box=rows)
            yield Piece(scale_name(piece.name), box.extent, layout.scale_dtype, box)


def _whole(tensor: Tensor) -> Box:
    return Box((0,) * tensor.dim(), tuple(tensor.shape))
