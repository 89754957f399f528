"""Ranks that share a model, as threads of one process: an exchange among them, and a way to run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from spmd_rl.kernels import add_rms_norm
from spmd_rl.kernels.linear.later_sum import LaterSum
from spmd_rl.kernels.linear.shard_exchange import rounded
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import ModelSpec

T = TypeVar("T")
DEADLINE_S = 120  # in which every rank must come to an exchange


class Meeting:
    """Where ranks leave their tensors for each other."""

    def __init__(self, num_ranks: int) -> None:
        self.left: list[Tensor | None] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=DEADLINE_S)

    def all(self, rank: int, own: Tensor) -> list[Tensor]:
        self.left[rank] = own.clone()
        self.barrier.wait()
        found = [one.clone() for one in self.left if one is not None]
        self.barrier.wait()
        return found


class ThreadExchange:
    """Implements `RowExchange`. `add` makes one tensor of those of all ranks."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        add: Callable[[list[Tensor]], Tensor] = sum_neighbours,
        is_recordable: bool = False,
    ) -> None:
        self._meeting, self._rank, self._add = meeting, rank, add
        self.is_recordable = is_recordable

    def sum(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return rounded(self._add(self._meeting.all(self._rank, part)), bias, dtype)

    def sum_later(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.sum(part, bias, dtype)

    def sum_rows(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        whole = self.sum(part, bias, dtype)
        return whole.chunk(self._meeting.barrier.parties)[self._rank]

    def rows(self, own: Tensor) -> Tensor:
        return torch.cat(self._meeting.all(self._rank, own))

    def gather_columns(self, own: Tensor) -> Tensor:
        return torch.cat(self._meeting.all(self._rank, own), 1)


class NormExchange(ThreadExchange):
    """Has norms take the sums in front of them, and counts those that they and others take."""

    num_normed = num_taken = 0

    def sum_later(self, part: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        def take() -> Tensor:
            self.num_taken += 1
            return self.sum(part, bias, dtype)

        def norm(residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            self.num_normed += 1
            return add_rms_norm(self.sum(part, bias, dtype), residual, weight, eps)

        return LaterSum(part.shape, dtype, part.device, take, norm)


def parts(
    num_ranks: int,
    add: Callable[[list[Tensor]], Tensor] = sum_neighbours,
    is_recordable: bool = False,
    kind: type[ThreadExchange] = ThreadExchange,
) -> list[ModelPart]:
    meeting = Meeting(num_ranks)
    exchanges = [kind(meeting, rank, add, is_recordable) for rank in range(num_ranks)]
    return [ModelPart(rank, num_ranks, one) for rank, one in enumerate(exchanges)]


def on_ranks(run: Callable[[int], T], num_ranks: int) -> list[T]:
    """Return what each rank's thread returns; raise what one of them raises."""
    found: list[T | BaseException] = [AssertionError("a rank has not ended")] * num_ranks

    def of_rank(rank: int) -> None:
        try:
            found[rank] = run(rank)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found  # type: ignore[return-value]


def part_of_model(spec: ModelSpec, weights: dict[str, Tensor], part: ModelPart) -> CausalLM:
    """Return the model of a rank, with its boxes of the weights."""
    model, boxes = CausalLM(spec, part=part), part.boxes(spec)
    for name, parameter in model.named_parameters():
        ends = zip(boxes[name].offset, boxes[name].end, strict=True)
        parameter.data.copy_(weights[name][tuple(slice(*one) for one in ends)])
    return model.requires_grad_(False)
