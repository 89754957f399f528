"""Sources of a push whose weights are made on the way: codes of masters, and merged adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from spmd_rl.kernels.low_precision.block_codes import encode
from spmd_rl.model.formats.coded_weights import scale_name
from spmd_rl.model.linear import merged
from spmd_rl.model.lora import A, B
from spmd_rl.train.fsdp2.coded_masters import CodedMasters
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.layout import Box, Piece, whole_box
from spmd_rl.weights.tensor_ends import LazyTensor, TensorSource


class CodedSource(TensorSource):
    """Gives the codes and scales of weights in few bits, and others of `weights` as they are.

    Codes are made of this rank's rows of the master weights. Every rank has all scales.
    """

    def __init__(
        self, weights: LocalTensors, coded: CodedMasters, on_open: Callable[[], None]
    ) -> None:
        self._coded = coded
        plain = [(name, one) for name, one in weights.items() if name not in coded.scales]
        super().__init__(plain, on_open, self._pieces_of_codes())

    def _pieces_of_codes(self) -> Iterator[LazyTensor]:
        code_format = self._coded.format
        for name, shard in self._coded.shards.items():
            shape = code_format.code_shape(shard.shape)
            rows = Box(shard.box.offset, (shard.box.extent[0], shape[1]))
            codes = Piece(name, shape, code_format.code_dtype, rows)
            yield LazyTensor(codes, partial(self._encode, name, shape[1]))
            whole = whole_box(code_format.scale_shape(shard.shape))
            scales = Piece(scale_name(name), whole.extent, code_format.scale_dtype, whole)
            yield LazyTensor(scales, partial(self._copy_scales, name))

    def _copy_scales(self, name: str, box: Box, out: Tensor) -> None:
        out.copy_(self._coded.scales[name][box.index])

    def _encode(self, name: str, num_columns: int, box: Box, out: Tensor) -> None:
        """Write `box` of the codes of a weight to `out`. All columns of its rows are made."""
        shard, scales = self._coded.shards[name], self._coded.scales[name]
        (first, column), (num_rows, width) = box.offset, box.extent
        values = shard.local.detach().narrow(0, first - shard.box.offset[0], num_rows)
        if width == num_columns:
            encode(self._coded.format, values, scales, first, out)
        else:
            codes = encode(self._coded.format, values, scales, first)
            out.copy_(codes.narrow(1, column, width))


class MergedSource(TensorSource):
    """Gives the weights that a base and adapters that learn beside it make together.

    A weight with an adapter is base + scale * B A in float32, and is rounded once. It is made when
    it is read, so that no other weight is in memory twice. `base` and `adapters` are this rank's
    rows. `gather` returns a parameter whose rows are sharded; all that have some call it in each
    `open`. `on_open` is called before each push.
    """

    def __init__(
        self,
        base: LocalTensors,
        adapters: LocalTensors,
        scale: float,
        gather: Callable[[str], Tensor],
        on_open: Callable[[], None],
    ) -> None:
        a = dict[str, Tensor]()  # whole, by the names of the layers
        ending = f".{B}.weight"
        layers = [name.removesuffix(ending) for name in adapters if name.endswith(ending)]

        def gather_a() -> None:
            """Gather A of each adapter, as the rows of a weight need all of it."""
            on_open()
            a.update((layer, gather(f"{layer}.{A}.weight").detach()) for layer in layers)

        def merge(layer: str, box: Box, out: Tensor) -> None:
            """Write `box`. All rows of this rank are made, so that any box has their bits."""
            shard, b = base[f"{layer}.weight"], adapters[layer + ending].local
            out.copy_(merged(shard.local, a[layer], b, scale)[box.within(shard.box)])

        layer_of = {f"{layer}.weight": layer for layer in layers}
        pieces = (one for one in base.layout(0).pieces if one.name in layer_of)
        lazy = [LazyTensor(piece, partial(merge, layer_of[piece.name])) for piece in pieces]
        super().__init__([one for one in base.items() if one[0] not in layer_of], gather_a, lazy)
