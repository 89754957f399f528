"""Optimizer of a trainer, built over a rank's shards as the config says.

It is elementwise AdamW, or Muon for some matrices, so it has parts: each updates some parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.adamw import ShardedAdamW, ShardedAdamW8bit, require_torchao
from spmd_rl.train.optimizer.host_stack import Reserve
from spmd_rl.train.optimizer.muon import ShardedMuon
from spmd_rl.train.optimizer.parameter_groups import UpdateRule
from spmd_rl.train.optimizer.streamed_adamw import StreamedAdamW
from spmd_rl.weights.local_tensors import LocalTensor


class OptimizerPart(Protocol):
    """An optimizer of some parameters. All ranks that shard them call each method together."""

    def step(self, lr: float) -> None:
        """Update the parameters that have a gradient. `lr` is the schedule's rate."""
        ...

    def state(self) -> State:
        """Return this rank's moments by kind: the memory itself."""
        ...

    def on_loaded(self, optimizer_steps: int) -> None:
        """Go on from a `state` that was loaded, taken after `optimizer_steps`."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """Return all memory that it keeps between steps, plain tensors only."""
        ...


class ShardOptimizer:
    """All parts of a trainer's optimizer as one."""

    def __init__(self, parts: Sequence[OptimizerPart]) -> None:
        self._parts = parts

    def step(self, lr: float) -> None:
        for part in self._parts:
            part.step(lr)

    def state(self) -> State:
        """Return the moments of all parts by kind. No two parts have a kind in common."""
        return {kind: tensors for part in self._parts for kind, tensors in part.state().items()}

    def on_loaded(self, optimizer_steps: int) -> None:
        for part in self._parts:
            part.on_loaded(optimizer_steps)

    def tensors(self) -> list[Tensor]:
        """Return all memory that the parts keep between steps."""
        return [tensor for part in self._parts for tensor in part.tensors()]


def build_optimizer(
    shards: Mapping[str, LocalTensor],
    rules: Mapping[str, UpdateRule],
    cfg: TrainerConfig,
    group: dist.ProcessGroup,
    reserve: Reserve | None = None,
) -> ShardOptimizer:
    """Return the optimizer of the parameters that have a rule. `group` are the ranks that shard.

    With `reserve`, moments lie in the host memory that it returns, and AdamW has all parameters.
    Raises: ConfigError where the library of 8-bit moments is missing; ResidencyError where the host
    has too little memory.
    """
    if reserve is not None:
        trained = {name: shards[name] for name in rules}
        return ShardOptimizer([StreamedAdamW(trained, rules, cfg, reserve)])
    if cfg.optimizer.kind == "adamw8bit":
        require_torchao()
    members = {
        algorithm: {name: shards[name] for name in rules if rules[name].algorithm == algorithm}
        for algorithm in ("adamw", "muon", "adamw8bit")
    }
    parts: list[OptimizerPart] = []
    if members["adamw"]:
        parts.append(ShardedAdamW(members["adamw"], rules, cfg))
    if members["adamw8bit"]:
        parts.append(ShardedAdamW8bit(members["adamw8bit"], rules, cfg))
    if members["muon"]:
        parts.append(ShardedMuon(members["muon"], rules, cfg, group))
    return ShardOptimizer(parts)
