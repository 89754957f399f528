"""The FSDP2 backend: float32 master weights sharded over the mesh, compute in float32 or bfloat16.

One mesh axis of size one is plain FSDP; dp x fsdp is HSDP, which shards within fsdp and replicates
over dp. The optimizer works on the local shards as plain tensors: AdamW is elementwise and needs
nothing of DTensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from spmd_rl.kernels import PackedAttention, head_logprobs, recomputing, token_logprobs
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import State
from spmd_rl.train.config import TrainerConfig, gathers_whole
from spmd_rl.train.determinism import SumInRankOrder, require_deterministic
from spmd_rl.train.flops import train_flops
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.weights.layout import chunk_box
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors


class Scorer(nn.Module):
    """The model and its head down to log-probabilities: the root that FSDP wraps, so that it
    gathers the head too.
    """

    def __init__(
        self, model: CausalLM, logit_rows: int, recomputes: bool, attention_split: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.logit_rows = logit_rows
        self.attention_split = attention_split
        self.recomputes = recomputes

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy [M] of the scored tokens; fp32 logits of no more than
        `logit_rows` at once.
        """
        spec, device = self.model.spec, micro.tokens.device
        attend = PackedAttention(
            micro.lengths,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            device=device,
            prefixes=micro.prefixes,
            split=self.attention_split,
        )
        hidden = self.model(micro.tokens, micro.positions, attend)
        if micro.num_scored == 0:
            # The other ranks' collectives expect this one's gradients, zeros, of every parameter,
            # the head's too.
            lp, entropy = token_logprobs(
                self.model.logits(hidden[:1]), micro.tokens[:1], torch.ones(1, device=device)
            )
            return lp.index_select(0, micro.rows), entropy.index_select(0, micro.rows)
        if hidden.is_cuda and not self.recomputes:
            rows, given = hidden.index_select(0, micro.rows), (micro.targets, micro.inv_temperature)
            return head_logprobs(rows, self.model.head, self.model.logits, *given, self.logit_rows)
        if micro.num_scored <= self.logit_rows:
            return self._score(hidden, micro, slice(None))
        chunks = [
            slice(start, start + self.logit_rows)
            for start in range(0, micro.num_scored, self.logit_rows)
        ]
        pieces = [
            checkpoint(self._score, hidden, micro, chunk, use_reentrant=False) for chunk in chunks
        ]
        return torch.cat([lp for lp, _ in pieces]), torch.cat([entropy for _, entropy in pieces])

    def _score(self, hidden: Tensor, micro: MicroBatch, chunk: slice) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(hidden.index_select(0, micro.rows[chunk]))
        return token_logprobs(logits, micro.targets[chunk], micro.inv_temperature[chunk])


class Fsdp2:
    """A model sharded over `mesh`, whose axes are dp and fsdp, with its AdamW. Weights are unset
    until `fill`.
    """

    def __init__(
        self, spec: ModelSpec, mesh: DeviceMesh, cfg: TrainerConfig, device: torch.device
    ) -> None:
        with torch.device("meta"):
            model = CausalLM(spec)
        self.device = device
        self._dtype = getattr(torch, cfg.dtype)
        if cfg.deterministic:
            require_deterministic(device, self._dtype, model.spec.head_dim, mesh.size(0))
        self.max_positions = model.spec.max_positions
        self.num_replicas = mesh.size(0)
        self.num_shards, self.shard = mesh.size(1), mesh.get_local_rank("fsdp")
        attention_backend(model.spec.head_dim, self._dtype, device, cfg.attention_split)
        self.scorer = Scorer(model, cfg.logit_rows, cfg.recompute == "all", cfg.attention_split)
        _recompute(model, cfg.recompute)
        self.units = _shard(self.scorer, mesh, cfg)
        self.scorer.to_empty(device=device)
        self.parameters = {
            name: cast(DTensor, parameter) for name, parameter in model.named_parameters()
        }
        self.local = {
            name: nn.Parameter(one.to_local().detach()) for name, one in self.parameters.items()
        }
        self.optimizer = _adamw(self.local, cfg)

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the first values, whole tensors by name, of which each rank keeps its rows."""
        with torch.no_grad():
            for name, whole in weights:
                rows = chunk_box(tuple(whole.shape), self.shard, self.num_shards)
                self.local[name].copy_(whole.narrow(0, rows.offset[0], rows.extent[0]))

    def contract(self) -> dict[str, str | int]:
        """What the forward pass's bits depend on, besides the weights."""
        return self.scorer.model.contract(self.device, self._dtype, self.scorer.attention_split)

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        return train_flops(self.scorer.model.spec, lengths, num_scored)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        scores = self.scorer(micro)
        if not torch.is_grad_enabled():
            # No backward pass drops the gathered weights: they would take memory, and be stale
            # after a load.
            for unit in self.units:
                unit.reshard()
        return scores

    def backward(self, loss: Tensor, last: bool) -> None:
        if self.num_shards == 1:
            # Whole gradients and weights take no more room than the shard: reduce and drop them
            # once a step.
            root = cast(FSDPModule, self.scorer)
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
        loss.backward()

    def square_norm(self) -> float:
        for name, parameter in self.parameters.items():
            # An empty shard, of fewer rows than ranks, has nothing to update.
            if parameter.grad is not None and self.local[name].numel():
                self.local[name].grad = cast(DTensor, parameter.grad).to_local()
        return float(nn.utils.get_total_norm(self._gradients())) ** 2 / self.num_replicas

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self.local.values() if one.grad is not None]

    def step(self, lr: float, grad_scale: float) -> None:
        if grad_scale != 1.0:
            torch._foreach_mul_(self._gradients(), grad_scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        for one in (*self.parameters.values(), *self.local.values()):
            one.grad = None

    def state(self) -> State:
        weights = list(self.held().items())
        moments = {kind: self._moments(weights, kind) for kind in ("exp_avg", "exp_avg_sq")}
        return {"weights": weights, **moments}

    def _moments(
        self, weights: Sequence[tuple[str, LocalTensor]], kind: str
    ) -> list[tuple[str, LocalTensor]]:
        return [
            (name, replace(one, local=self.optimizer.state[one.local][kind]))
            for name, one in weights
        ]

    def loaded(self, optimizer_steps: int) -> None:
        for moments in self.optimizer.state.values():
            moments["step"].fill_(optimizer_steps)

    def held(self) -> LocalTensors:
        return LocalTensors(
            {
                name: LocalTensor(
                    tuple(parameter.shape),
                    chunk_box(tuple(parameter.shape), self.shard, self.num_shards),
                    self.local[name],
                )
                for name, parameter in self.parameters.items()
            }
        )

    def full(self, name: str) -> Tensor:
        """One whole parameter, on every rank."""
        return self.parameters[name].full_tensor()


def _recompute(model: CausalLM, what: Literal["none", "cheap", "all"]) -> None:
    """Of each layer keep everything, all but what `recomputing` makes again, or its input alone, for
    the backward pass.

    The forward is wrapped, not the module: names stay.
    """
    for layer in model.model.layers:
        if what == "cheap":
            layer.forward = recomputing()(layer.forward)
        elif what == "all":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _shard(scorer: Scorer, mesh: DeviceMesh, cfg: TrainerConfig) -> list[FSDPModule]:
    """The units that are gathered at once. Gradients are summed, not averaged: losses are divided
    once, by the batch's denominator."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.dtype) if cfg.dtype != "float32" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    num_bytes = sum(parameter.nbytes for parameter in scorer.parameters())
    units = (
        [scorer]
        if gathers_whole(cfg, num_bytes, mesh.size())
        else [*scorer.model.model.layers, scorer]
    )
    keeps = False if mesh.size(1) == 1 else None
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh if mesh.size(0) > 1 else mesh["fsdp"],
            mp_policy=policy,
            reshard_after_forward=keeps,
        )
        cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
        cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        if cfg.deterministic:
            cast(FSDPModule, unit).set_custom_reduce_scatter(cast(Any, SumInRankOrder()))
    return [cast(FSDPModule, unit) for unit in units]


def _adamw(local: dict[str, nn.Parameter], cfg: TrainerConfig) -> torch.optim.AdamW:
    """AdamW with its state in place, so that a checkpoint can be loaded before the first step."""
    matrices = [one for one in local.values() if one.dim() > 1]
    vectors = [one for one in local.values() if one.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": cfg.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
    for one in local.values():
        optimizer.state[one] = {
            "step": torch.zeros((), dtype=torch.float32, device=one.device),
            "exp_avg": torch.zeros_like(one, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(one, requires_grad=False),
        }
    return optimizer
