"""Sums of gradients over the micro-batches of a step, in an order that does not depend on how many
ranks there are.

A batch has a fixed number of parts, dealt out in turn: of R ranks, rank r has the parts r, r + R,
r + 2 R and so on. So the sum over ranks, neighbours first (determinism.py), is that of R
consecutive parts. A rank adds these sums up in the same way. The whole is one binary tree over all
parts, whatever R, a power of two. What waits for its neighbour is a shard of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

Gradients = dict[str, Tensor]  # a rank's shards, by the names of parameters


class NeighbourSums:
    """A sum of gradients that come one by one: neighbours are added, then neighbours of these sums.

    It is `sum_neighbours` (kernels/runtime), and keeps at most one sum for each power of two.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Gradients]] = []  # with the number of gradients in each

    def add(self, gradients: Gradients) -> None:
        """Add the next gradients, whose memory it keeps."""
        self._sums.append((1, gradients))
        while len(self._sums) > 1 and self._sums[-1][0] == self._sums[-2][0]:
            self._join()

    def total(self) -> Gradients:
        """Return the sum of all; nothing is added after it."""
        while len(self._sums) > 1:
            self._join()
        return self._sums[0][1]

    def _join(self) -> None:
        (left, total), (right, other) = self._sums[-2:]
        self._sums[-2:] = [(left + right, added(total, other))]


class Accumulation:
    """Runs micro-batches forward and backward, and leaves the sum as each parameter's gradient.

    This rank has `num_parts` parts of the data. With `at_once`, a part's micro-batches are summed
    before ranks are, and weights are freed once a step. Otherwise ranks are summed after each
    micro-batch, then parts, and then the first micro-batches of all parts and those that follow.
    """

    def __init__(
        self,
        root: FSDPModule,
        parameters: Mapping[str, nn.Parameter],
        num_parts: int,
        at_once: bool,
    ) -> None:
        self._root = root
        self._parameters = parameters
        self._num_parts = num_parts
        self._at_once = at_once

    def run(self, count: int, loss_of: Callable[[int], Tensor], finish: Callable[[], None]) -> None:
        """Run `count` micro-batches, as many of each part: first all of the first part.

        `loss_of` returns the loss of one by its number. `finish` is called after each.
        """
        total: Gradients | None = None
        for of_parts in self._rounds(count):
            tree = NeighbourSums()
            for numbers in of_parts:
                for number in numbers:
                    loss = loss_of(number)
                    if self._at_once:
                        self._root.set_requires_gradient_sync(number == numbers[-1])
                        self._root.set_reshard_after_backward(number == count - 1)
                    loss.backward()
                    finish()
                if self._num_parts > 1:  # a lone part's gradients add up where they are
                    tree.add(self._taken())
            if self._num_parts > 1:
                total = tree.total() if total is None else added(total, tree.total())
        for name, gradient in (total or {}).items():
            self._parameters[name].grad = gradient

    def _rounds(self, count: int) -> list[list[Sequence[int]]]:
        """Return the micro-batches of each part between two sums over ranks, in their order."""
        length = count // self._num_parts
        firsts = range(0, count, length)
        if self._at_once:
            return [[range(first, first + length) for first in firsts]]
        return [[range(first + one, first + one + 1) for first in firsts] for one in range(length)]

    def _taken(self) -> Gradients:
        """Return the gradients, and leave none."""
        found = {name: one.grad for name, one in self._parameters.items() if one.grad is not None}
        for name in found:
            self._parameters[name].grad = None
        return found


def added(total: Gradients, other: Gradients) -> Gradients:
    """Add other gradients to `total`, of the same parameters, and return it."""
    pairs = [(_local(one), _local(other[name])) for name, one in total.items()]
    assert len(other) == len(pairs)
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
    return total


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def discard_unreduced(units: Sequence[FSDPModule]) -> None:
    """Discard the gradients that FSDP keeps for a later micro-batch to reduce."""
    for unit in units:
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it was gathered before
                parameter._unsharded_param.grad = None
