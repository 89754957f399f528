"""FSDP2 backend: float32 master weights sharded over the mesh, compute in float32 or bfloat16.

The optimizer works on the local shards as plain tensors (optimizers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spmd_rl.algo.losses import Needs
from spmd_rl.kernels import recomputing
from spmd_rl.model.network import CausalLM
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.model.value_head import ValueModel, ValueScorer
from spmd_rl.train.backend import LossOf, State
from spmd_rl.train.config import TrainerConfig, fsdp2_settings
from spmd_rl.train.determinism import SumInRankOrder, require_deterministic
from spmd_rl.train.flops import train_flops
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.train.optimizers import build_optimizer
from spmd_rl.train.parameter_groups import UpdateRule, update_rules
from spmd_rl.train.sharded_model import ShardedModel


class Fsdp2(ShardedModel):
    """A model sharded over `mesh`, whose axes are dp and fsdp, with its optimizer.

    Weights are unset until `fill`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        mesh: DeviceMesh,
        cfg: TrainerConfig,
        device: torch.device,
        head: Head = "lm",
    ) -> None:
        dtype = getattr(torch, cfg.dtype)
        if cfg.deterministic:
            require_deterministic(device, dtype, spec.head_dim, mesh.size(0))
        scorer = _scorer(spec, cfg, head)
        _recompute(scorer.model, fsdp2_settings(cfg).recompute)
        rules = _freeze(scorer.model, cfg, mesh.size(1))
        reshard = False if mesh.size(1) == 1 else None
        super().__init__(scorer, mesh, device, dtype, fsdp2_settings(cfg).gathers_whole, reshard)
        _sum_gradients(self.units, cfg.deterministic)
        self.optimizer = build_optimizer(self.local_weights(), rules, cfg, mesh.get_group("fsdp"))

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        has_logits = isinstance(self.scorer, Scorer)
        return train_flops(self.scorer.model.spec, lengths, num_scored if has_logits else 0)

    def forward_backward(self, micros: Sequence[MicroBatch], loss_of: LossOf, needs: Needs) -> None:
        for number, micro in enumerate(micros):
            loss = loss_of(number, self._outputs(micro, needs))
            if self.num_shards == 1:
                # Whole gradients and weights are no larger than the shard, so they are reduced and
                # freed once a step.
                root, is_last = cast(FSDPModule, self.scorer), number == len(micros) - 1
                root.set_requires_gradient_sync(is_last)
                root.set_reshard_after_backward(is_last)
            loss.backward()

    def square_norm(self) -> float:
        for name, parameter in self.parameters.items():
            # An empty shard, of fewer rows than ranks, has nothing to update.
            if parameter.grad is not None and self.local[name].numel():
                self.local[name].grad = cast(DTensor, parameter.grad).to_local()
        return float(nn.utils.get_total_norm(self._gradients())) ** 2 / self.num_replicas

    def _gradients(self) -> list[Tensor]:
        shards = self.local.values()
        return [shard.grad for shard in shards if shard.grad is not None]

    def step(self, lr: float, grad_scale: float) -> None:
        if grad_scale != 1.0:
            torch._foreach_mul_(self._gradients(), grad_scale)
        self.optimizer.step(lr)
        self.discard()

    def discard(self) -> None:
        for parameter in (*self.parameters.values(), *self.local.values()):
            parameter.grad = None

    def state(self) -> State:
        return {**super().state(), **self.optimizer.state()}

    def on_loaded(self, optimizer_steps: int) -> None:
        self.optimizer.on_loaded(optimizer_steps)


def _recompute(model: CausalLM, what: Literal["none", "cheap", "all"]) -> None:
    """Have each layer keep for its backward pass everything, all but cheap ops, or its input alone.

    The forward method is wrapped and not the module, so that parameters keep their names.
    """
    for layer in model.model.layers:
        if what == "cheap":
            layer.forward = recomputing()(layer.forward)
        elif what == "all":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _freeze(model: CausalLM, cfg: TrainerConfig, num_shards: int) -> dict[str, UpdateRule]:
    """Have trained parameters alone take gradients, and return how each of them is updated."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    rules = update_rules(shapes, cfg, num_shards)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in rules)
    return rules


def _scorer(spec: ModelSpec, cfg: TrainerConfig, head: Head) -> Scorer | ValueScorer:
    """Return the module that computes what the head gives, on the meta device."""
    with torch.device("meta"):
        if head == "value":
            return ValueScorer(ValueModel(spec), cfg.attention_split)
        recomputes = fsdp2_settings(cfg).recompute == "all"
        return Scorer(CausalLM(spec), cfg.logit_rows, recomputes, cfg.attention_split)


def _sum_gradients(units: Sequence[FSDPModule], deterministic: bool) -> None:
    """Have gradients summed and not averaged: losses are divided by the batch's denominator."""
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        if deterministic:
            unit.set_custom_reduce_scatter(cast(Any, SumInRankOrder()))
