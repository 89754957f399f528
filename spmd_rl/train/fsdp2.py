"""FSDP2 backend: float32 master weights sharded over the mesh, compute in float32 or bfloat16.

One mesh axis of size one is plain FSDP. dp x fsdp is HSDP, which shards within fsdp and replicates
over dp. The optimizer works on the local shards as plain tensors (optimizers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

from spmd_rl.algo.losses import Needs
from spmd_rl.kernels import recomputing
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.model.network import CausalLM
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import LossOf, Outputs, State, Visit
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.determinism import SumInRankOrder, require_deterministic
from spmd_rl.train.flops import train_flops
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.train.optimizers import build_optimizer
from spmd_rl.train.parameter_groups import UpdateRule, update_rules
from spmd_rl.weights.layout import chunk_box
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.tensor_ends import TensorSource


class Fsdp2:
    """A model sharded over `mesh`, whose axes are dp and fsdp, with its optimizer.

    Weights are unset until `fill`.
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
        self.scorer = Scorer(
            model, cfg.logit_rows, cfg.backend.recompute == "all", cfg.attention_split
        )
        _recompute(model, cfg.backend.recompute)
        rules = _freeze(model, cfg, self.num_shards)
        self.units = _shard(self.scorer, mesh, cfg)
        self.scorer.to_empty(device=device)
        self.parameters = {
            name: cast(DTensor, parameter) for name, parameter in model.named_parameters()
        }
        self.local = {
            name: nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
            for name, parameter in self.parameters.items()
        }
        self.optimizer = build_optimizer(self._weights(), rules, cfg, mesh.get_group("fsdp"))

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights from whole tensors by name, of which each rank keeps its rows."""
        with torch.no_grad():
            for name, whole in weights:
                rows = chunk_box(tuple(whole.shape), self.shard, self.num_shards)
                self.local[name].copy_(whole.narrow(0, rows.offset[0], rows.extent[0]))

    def contract(self) -> dict[str, str | int]:
        """Return what the forward pass's bits depend on besides the weights."""
        return self.scorer.model.contract(self.device, self._dtype, self.scorer.attention_split)

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        return train_flops(self.scorer.model.spec, lengths, num_scored)

    def forward(self, micros: Sequence[MicroBatch], visit: Visit, needs: Needs) -> None:
        with torch.no_grad():
            for number, micro in enumerate(micros):
                outputs = self._outputs(micro, needs)
                # Without a backward pass nothing frees the gathered weights: they would take
                # memory, and be stale after a load.
                for unit in self.units:
                    unit.reshard()
                visit(number, outputs)

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

    def _outputs(self, micro: MicroBatch, needs: Needs) -> Outputs:
        candidates = micro.columns["candidates"].long() if needs.candidates else None
        scores = self.scorer(micro, entropy_grad=needs.entropy, candidates=candidates)
        return Outputs(*scores)

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
        return {"weights": list(self._weights().items()), **self.optimizer.state()}

    def on_loaded(self, optimizer_steps: int) -> None:
        self.optimizer.on_loaded(optimizer_steps)

    def source(self) -> TensorSource:
        return TensorSource(self._weights().items())

    def names(self) -> list[str]:
        return list(self.parameters)

    def gather(self, name: str) -> Tensor:
        """Return one whole parameter, on every rank."""
        return self.parameters[name].full_tensor()

    def _weights(self) -> LocalTensors:
        """Return this rank's shards of the master weights."""
        shards = {}
        for name, parameter in self.parameters.items():
            shape = tuple(parameter.shape)
            box = chunk_box(shape, self.shard, self.num_shards)
            shards[name] = LocalTensor(shape, box, self.local[name])
        return LocalTensors(shards)


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


def _shard(scorer: Scorer, mesh: DeviceMesh, cfg: TrainerConfig) -> list[FSDPModule]:
    """Return the units whose weights are gathered at once.

    Gradients are summed and not averaged, because losses are divided by the batch's denominator.
    """
    policy = _mixed_precision(cfg)
    units = _units(scorer, mesh, cfg)
    reshard = False if mesh.size(1) == 1 else None
    for unit in units:
        fully_shard(
            unit,
            mesh=mesh if mesh.size(0) > 1 else mesh["fsdp"],
            mp_policy=policy,
            reshard_after_forward=reshard,
        )
        cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
        cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        if cfg.deterministic:
            cast(FSDPModule, unit).set_custom_reduce_scatter(cast(Any, SumInRankOrder()))
    return [cast(FSDPModule, unit) for unit in units]


def _mixed_precision(cfg: TrainerConfig) -> MixedPrecisionPolicy:
    """Return the policy: compute in the config's dtype, and sum gradients in float32."""
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, cfg.dtype) if cfg.dtype != "float32" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def _units(scorer: Scorer, mesh: DeviceMesh, cfg: TrainerConfig) -> list[nn.Module]:
    """Return the modules to shard: the whole scorer, or each layer and then the rest."""
    num_bytes = sum(parameter.nbytes for parameter in scorer.parameters())
    if cfg.backend.gathers_whole(num_bytes, mesh.size()):
        return [scorer]
    return [*scorer.model.model.layers, scorer]
