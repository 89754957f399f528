"""Steps of engines that share experts, where decoding is recorded as graphs.

Each rank plans a step of its own: prompts, a decoding step, or nothing. Rows of prompts go to their
experts as a trainer's do, by collectives that all ranks enter. Rows of a decoding step go by
`SymmGather` in a recorded graph, which all ranks replay with equally many rows, padding included.
So a step has two parts, each of them if some rank plans it: prompts first, then decoding. All ranks
take part in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from spmd_rl.kernels.moe.symm_gather import SymmGather
from spmd_rl.kernels.runtime.cuda_graph import GraphMemory, record
from spmd_rl.model.layers.moe_module import gather_of, shares_experts
from spmd_rl.model.layers.split_experts import gathering
from spmd_rl.model.network import CausalLM

Outputs = TypeVar("Outputs")


class ExpertRanks(NamedTuple):
    """The ranks that share an engine's experts, and whether one host has all of their GPUs."""

    group: dist.ProcessGroup
    are_of_one_host: bool


class JointStep(NamedTuple):
    """What all ranks do in a step: prompts if some rank has any, then decoding.

    `num_rows` is the most rows that a rank decodes, 0 where none does.
    """

    has_prompts: bool
    num_rows: int

    @classmethod
    def of(cls, plans: Sequence[Sequence[int]]) -> JointStep:
        """Return what the plans of all ranks make together, each as `JointSteps.agree` tells it."""
        prompts, rows = zip(*plans, strict=True)
        return cls(any(prompts), max(rows))


class JointSteps:
    """This rank's part in the steps of its group."""

    def __init__(self, model: CausalLM, group: dist.ProcessGroup, max_rows: int) -> None:
        """Make the memory in which a rank's rows meet, at most `max_rows` of each rank.

        Ranks: all of the group. Blocks: until each has called.
        """
        self._model = model
        self._group = group
        self._gather = gather_of(model, group, max_rows)

    def agree(self, *, has_prompts: bool, num_rows: int) -> JointStep:
        """Tell the other ranks what this one plans, and return what all of them do.

        Blocks: until the other ranks have planned this step.
        """
        own = torch.tensor([int(has_prompts), num_rows])
        plans = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(plans, own, group=self._group)
        return JointStep.of([plan.tolist() for plan in plans])

    def record(
        self, work: Callable[[], Outputs], memory: GraphMemory
    ) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Record a decoding step, as `cuda_graph.record` does. The other ranks need not."""

        def gathered(gather: SymmGather) -> Outputs:
            with gathering(self._model, gather):
                return work()

        return record(
            lambda: gathered(self._gather), memory, lambda: gathered(self._gather.rehearsal())
        )


def can_record(model: CausalLM, experts: ExpertRanks | None) -> bool:
    """Whether the exchange of rows, if there is one, can be part of a recorded graph."""
    return not shares_experts(model) or (experts is not None and experts.are_of_one_host)
