"""What recomputation saves of a trainer's memory, and what it costs in operations. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.plan.roles import PlannedRole
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.memory import step_sizes

# Of the operations of a step, two of six are the forward pass, which "all" does again. "cheap"
# repeats no matrix product, and elementwise operations are too few to count.
EXTRA_OPERATIONS: dict[Recompute, float] = {"none": 0.0, "cheap": 0.0, "all": 2 / 6}


@dataclass(frozen=True)
class RecomputeRow:
    """A choice: the bytes of activations at their peak, and the share of operations added."""

    choice: Recompute
    num_bytes: int
    extra: float
    is_chosen: bool


def recompute_rows(spec: ModelSpec, train: PlannedRole) -> Iterator[RecomputeRow]:
    """Yield a row for each choice that the trainer's backend has beside its other settings."""
    cfg: TrainerConfig = train.cfg
    head: Head = getattr(train.role, "HEAD", "lm")
    for choice, backend in cfg.backend.recompute_choices.items():
        sizes = step_sizes(spec, replace(cfg, backend=backend), train.placement, head).activations
        yield RecomputeRow(choice, sizes.peak, EXTRA_OPERATIONS[choice], backend == cfg.backend)
