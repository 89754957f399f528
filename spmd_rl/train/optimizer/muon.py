"""Muon over sharded matrices: torch.optim.Muon on whole matrices, each at one rank, its owner.

Muon makes the update of a matrix orthogonal, which takes the whole matrix. A shard is some rows of
it. So the ranks send their rows of the gradient and of the weight to the owner, which takes the
step and sends the new rows back. A matrix has the same bits on any number of ranks, given the same
gradient, and the work is divided among them. With one shard nothing is sent.

A step sends each rank's gradients, weights and new weights once: 12 bytes for each parameter of its
shards. It takes the memory of about six matrices. The momentum lies whole at the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.optimizer.parameter_groups import UpdateRule, matrix_order
from spmd_rl.train.optimizer.torch_groups import set_rates, state_tensors, torch_groups
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Box, Dims, chunk_box

KIND = "momentum_buffer"


class ShardedMuon:
    """Muon for the matrices that `rules` gives to it. All ranks of `group` call each method."""

    def __init__(
        self,
        shards: Mapping[str, LocalTensor],
        rules: Mapping[str, UpdateRule],
        cfg: TrainerConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self._shards = shards
        self._group = group
        self._num_shards = group.size()
        self._rank = group.rank()
        names = matrix_order({name: shard.shape for name, shard in shards.items()})
        self._rounds = [
            names[start : start + self._num_shards]
            for start in range(0, len(names), self._num_shards)
        ]
        self._owned = {
            name: self._parameter(name) for name in names[self._rank :: self._num_shards]
        }
        self._optimizer = torch.optim.Muon(
            torch_groups(self._owned, rules),
            lr=cfg.lr,
            momentum=cfg.optimizer.momentum,
            adjust_lr_fn=cfg.optimizer.adjust_lr,
        )
        for name, parameter in self._owned.items():
            whole = torch.zeros(shards[name].shape, device=shards[name].local.device)
            self._optimizer.state[parameter][KIND] = whole

    def _parameter(self, name: str) -> nn.Parameter:
        """Return the parameter of an owned matrix. It has no rows outside of a step."""
        shard = self._shards[name]
        if self._num_shards == 1:
            assert isinstance(shard.local, nn.Parameter)
            return shard.local
        return nn.Parameter(shard.local.new_empty(0, shard.shape[1]))

    def step(self, lr: float) -> None:
        set_rates(self._optimizer, lr)
        if self._num_shards == 1:
            self._optimizer.step()
            return
        for names in self._rounds:
            self._step_round(names)

    @torch.no_grad()
    def _step_round(self, names: Sequence[str]) -> None:
        """Update matrices of which each rank owns at most one."""
        shards = [self._shards[name].local for name in names]
        weight = self._to_owners(names, shards)
        gradient = self._to_owners(names, [_gradient(shard) for shard in shards])
        if self._rank < len(names):
            parameter = self._owned[names[self._rank]]
            parameter.data, parameter.grad = weight, gradient
            self._optimizer.step()
            parameter.data, parameter.grad = weight.new_empty(0, weight.shape[1]), None
        self._from_owners(names, weight, shards)

    def _to_owners(self, names: Sequence[str], shards: Sequence[Tensor]) -> Tensor:
        """Return the whole matrix that this rank owns, empty if it owns none of `names`."""
        sent = torch.cat([shard.detach().flatten() for shard in shards])
        received = sent.new_empty(sum(self._own_sizes(names)))
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=self._own_sizes(names),
            input_split_sizes=self._shard_sizes(names),
            group=self._group,
        )
        if self._rank < len(names):
            return received.view(self._shards[names[self._rank]].shape)
        return received

    def _from_owners(self, names: Sequence[str], whole: Tensor, shards: Sequence[Tensor]) -> None:
        """Set this rank's rows from the whole matrices at their owners."""
        received = whole.new_empty(sum(shard.numel() for shard in shards))
        dist.all_to_all_single(
            received,
            whole.flatten(),
            output_split_sizes=self._shard_sizes(names),
            input_split_sizes=self._own_sizes(names),
            group=self._group,
        )
        sizes = [shard.numel() for shard in shards]
        for shard, rows in zip(shards, received.split(sizes), strict=True):
            shard.copy_(rows.view(shard.shape))

    def _shard_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the elements of this rank's rows of each rank's matrix."""
        sizes = [self._shards[name].local.numel() for name in names]
        return sizes + [0] * (self._num_shards - len(names))

    def _own_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the elements of each rank's rows of this rank's matrix."""
        if self._rank >= len(names):
            return [0] * self._num_shards
        shape = self._shards[names[self._rank]].shape
        return [
            chunk_box(shape, shard, self._num_shards).num_elements
            for shard in range(self._num_shards)
        ]

    def state(self) -> State:
        shards = self._shards.items()
        return {KIND: [(name, self._momentum(name, shard.shape)) for name, shard in shards]}

    def _momentum(self, name: str, shape: Dims) -> LocalTensor:
        """Return the momentum of a matrix: the whole at its owner, and no rows elsewhere."""
        if name in self._owned:
            whole = self._optimizer.state[self._owned[name]][KIND]
            return LocalTensor(shape, Box((0, 0), shape), whole)
        empty = self._shards[name].local.new_empty(0, shape[1])
        return LocalTensor(shape, Box((0, 0), (0, shape[1])), empty)

    def tensors(self) -> list[Tensor]:
        return state_tensors(self._optimizer)

    def on_loaded(self, optimizer_steps: int) -> None:
        """Do nothing: Muon counts no steps."""


def _gradient(shard: Tensor) -> Tensor:
    """Return the gradient of a shard; an empty shard has none."""
    return torch.zeros_like(shard) if shard.grad is None else shard.grad
