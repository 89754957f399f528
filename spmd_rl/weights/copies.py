"""Copies of many tensors, prepared once for all pushes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor


class Copies:
    """Copies of each tensor to its target, with a cast where dtypes differ; few launches on a GPU.

    They are prepared once and may run many times: both sides are kept, and have to keep their
    memory. torch copies a list at once where all pairs have the same two dtypes, and equal strides.
    Masters become bfloat16 in a kernel of ours.
    """

    def __init__(self, targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        self._runs: list[Callable[[], object]] = []
        lists: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for target, tensor in zip(targets, tensors, strict=True):
            same_strides = target.stride() == tensor.stride()
            if target.device == tensor.device and same_strides:
                lists[target.device, target.dtype, tensor.dtype].append((target, tensor))
            else:
                self._runs.append(partial(target.copy_, tensor))
        for pairs in lists.values():
            rest = self._add_masters(pairs) if pairs[0][0].is_cuda else pairs
            if rest:
                of_list = [target for target, _ in rest], [tensor for _, tensor in rest]
                self._runs.append(partial(torch._foreach_copy_, *of_list))

    def run(self) -> None:
        """Copy everything. On a GPU, the copies are queued on the current stream."""
        for run in self._runs:
            run()

    def _add_masters(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Have our kernel copy the pairs that it takes; return the others."""
        from spmd_rl.kernels.runtime import run_copies

        fits = [run_copies.can_copy(*pair) for pair in pairs]
        if any(fits):
            masters = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
            self._runs.append(run_copies.MasterCopies(masters).run)
        return [pair for pair, fit in zip(pairs, fits, strict=True) if not fit]


def copy_all(targets: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy each tensor to its target."""
    Copies(targets, tensors).run()
