"""RoundedShards: what FSDP gathers of weights whose shards are rounded in place of being cast.

Weights of one shape that one unit gathers, as the experts of a layer are, are rounded together when
the first of them is asked for: on a GPU, by one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from spmd_rl.kernels.low_precision.code_format import CodeFormat
from spmd_rl.weights.local_tensors import LocalTensor

Gathered = tuple[tuple[Tensor, ...], None]


class CodedShard(NamedTuple):
    """This rank's rows of a master weight, and the scales of all rows."""

    shard: LocalTensor
    scales: Tensor


class RoundedShards:
    """Shards of weights of one shape, of which each rank gives `num_rows` rows of `dtype`.

    FSDP's hooks take them, each once in a gathering. Rounded rows wait for their hook, so `forget`
    must be called whenever the weights have changed: a gathering may have been broken off.
    """

    def __init__(
        self,
        code_format: CodeFormat,
        shards: Mapping[str, CodedShard],
        num_rows: int,
        dtype: torch.dtype,
    ) -> None:
        self._format, self._shards = code_format, dict(shards)
        self._num_rows, self._dtype = num_rows, dtype
        self._ready: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Drop rows that no hook has taken."""
        self._ready.clear()

    def hook(self, name: str) -> Callable[..., Gathered]:
        """Return FSDP's hook that makes what is gathered of the weight `name`."""

        def before(
            mesh: object, outer_size: object, outer_stride: object, module: object, policy: object
        ) -> Gathered:
            if name not in self._ready:
                self._ready = dict(zip(self._shards, self._rounded().unbind(), strict=True))
            return (self._ready.pop(name),), None

        return before

    @torch.no_grad()
    def _rounded(self) -> Tensor:
        """Return the rows of all weights, in their order. Shape: [weights, num_rows, K]."""
        held = [one.shard for one in self._shards.values()]
        values, scales = (
            [one.local.detach() for one in held],
            [one.scales for one in self._shards.values()],
        )
        first_row = held[0].box.offset[0]
        return self._format.rounded_each(values, scales, self._dtype, first_row, self._num_rows)


def as_gathered(
    outputs: tuple[Tensor, ...], metadata: object, dtype: torch.dtype, *, out: object = None
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered rows as the weight, which uses their memory from then on."""
    return None if out is not None else (outputs[0], ())
