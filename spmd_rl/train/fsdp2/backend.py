"""FSDP2 backend: float32 master weights sharded over the mesh, compute in float32 or bfloat16.

The optimizer works on the local shards as plain tensors (optimizers.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spmd_rl.algo.losses import Needs
from spmd_rl.model.attention import head_size, latent_size
from spmd_rl.model.formats import FORMATS
from spmd_rl.model.formats.coded_weights import coded_shapes, weights_fact
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.lora import is_adapter
from spmd_rl.model.network import CausalLM
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.backend import LossOf, State
from spmd_rl.train.balance import has_balance
from spmd_rl.train.config import TrainerConfig, fsdp2_settings
from spmd_rl.train.cost.flops import train_flops
from spmd_rl.train.fsdp2.accumulation import Accumulation, discard_unreduced
from spmd_rl.train.fsdp2.coded_masters import CodedMasters, SharedMasters
from spmd_rl.train.fsdp2.determinism import require_deterministic, sum_gradients
from spmd_rl.train.fsdp2.exact_norm import exact_square_norm, has_exact_norm
from spmd_rl.train.fsdp2.kept_activations import keep_less
from spmd_rl.train.fsdp2.scorers import new_scorer
from spmd_rl.train.fsdp2.sharded_model import ShardedModel
from spmd_rl.train.fsdp2.sharing import ALONE, Sharing
from spmd_rl.train.fsdp2.sources import CodedSource, MergedSource
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.train.optimizer.optimizers import ShardOptimizer, build_optimizer
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES, UpdateRule, update_rules
from spmd_rl.weights.ends import WeightSource
from spmd_rl.weights.tensor_ends import do_nothing


class Fsdp2(ShardedModel):
    """A model sharded over `mesh`, whose axes are dp and fsdp, with its optimizer.

    Weights are unset until `fill`. `model` names one that `transformers` computes. Master weights,
    moments and the base beside adapters are in regions of `memory`.
    """

    _is_base_alone = False

    def __init__(
        self,
        spec: ModelSpec,
        mesh: DeviceMesh,
        cfg: TrainerConfig,
        device: torch.device,
        head: Head = "lm",
        memory: RoleMemory | None = None,
        sharing: Sharing = ALONE,
        model: str = "",
    ) -> None:
        dtype = getattr(torch, cfg.dtype)
        if cfg.deterministic:
            require_deterministic(device, dtype, head_size(spec), latent_size(spec))
        self._memory = memory = memory or RoleMemory(None, device)
        settings = fsdp2_settings(cfg)
        self._offload = settings.offload
        self.balances = has_balance(spec, cfg)
        self._is_adamw = cfg.optimizer.kind == "adamw"
        recomputes = settings.recompute == "all"
        scorer = new_scorer(spec, model, cfg, head, sharing.part, cfg.lora, recomputes)
        self._activations = keep_less(scorer.model, settings, device, memory)
        base = _make_base(scorer.model, dtype) if cfg.lora.rank else frozenset[str]()
        rules = _freeze(scorer.model, cfg, mesh.size(1), base)
        reshard = False if mesh.size(1) == 1 else None
        super().__init__(
            scorer,
            mesh,
            device,
            dtype,
            settings.gathers_whole,
            reshard,
            base,
            partial(self._allocating, cfg),
            sharing,
        )
        self._hold(cfg)
        sum_gradients(self.units, cfg.deterministic)
        self._accumulation = self._accumulating(cfg)
        group = mesh.get_group("fsdp")
        of_norm = group if self._tensors is None else self._tensors.role_group
        self._exact_norm_group = of_norm if has_exact_norm(spec, cfg) else None
        self.optimizer = self._built(cfg, rules, group)
        self._weights = cfg.weights
        self._coded = self._coded_masters(group)

    def _coded_masters(self, group: ProcessGroup) -> CodedMasters | None:
        """Return the master weights that compute as codes, by the ranks that shard them."""
        if self._weights == "full":
            return None
        coded, experts = coded_shapes(self.scorer.model.spec, self._weights), self._experts
        names = sorted((self.local.keys() - self.base) & coded.keys())
        of_experts = [name for name in names if self.held[name].axis == "ep"]
        others = [name for name in names if self.held[name].axis != "ep"]
        parts = [SharedMasters(self.shards_of(others), group, self._dtype)]
        if experts is not None:
            shards = self.shards_of(of_experts)
            parts.append(SharedMasters(shards, experts.mesh.get_group(), torch.float32))
        return CodedMasters(parts, self.scorer.model, FORMATS[self._weights])

    def _accumulating(self, cfg: TrainerConfig) -> Accumulation:
        """Return the order of sums over micro-batches, for as many parts of the data as it has."""
        at_once = self.num_shards == 1 or len(self.units) == 1
        if cfg.data_parts:  # the order must not follow from the number of shards
            num_bytes = FP32_BYTES * sum(row.spec.num_elements for row in self.held.values())
            at_once = self._experts is None and fsdp2_settings(cfg).gathers_whole(num_bytes)
        sharing = 1 if self._sequences is None else self._sequences.size
        num_parts = max(1, cfg.data_parts * sharing // (self.num_shards * self.num_replicas))
        return Accumulation(cast(FSDPModule, self.scorer), self.parameters, num_parts, at_once)

    def _hold(self, cfg: TrainerConfig) -> None:
        """Say which tensors lie in which region of the memory."""
        base = sorted(self.base & self.local.keys())
        for is_base, names in ((False, list(self.local_weights())), (True, base)):
            self._memory.hold(_tag(cfg, is_base), partial(self._locals, names))

    def _allocating(
        self, cfg: TrainerConfig, is_base: bool, sizes: list[int]
    ) -> AbstractContextManager[None]:
        return self._memory.allocating(_tag(cfg, is_base), sizes, self._offload == "master")

    def _locals(self, names: Sequence[str]) -> list[Tensor]:
        return [self.local[name] for name in names]

    def _built(
        self, cfg: TrainerConfig, rules: Mapping[str, UpdateRule], group: ProcessGroup
    ) -> ShardOptimizer:
        """Return the optimizer, with its state in host memory or in a region of its own."""
        own = {name: rule for name, rule in rules.items() if name in self.local}
        build = partial(build_optimizer, self.local_weights(), own, cfg, group)
        memory = self._memory
        if self._offload != "none":
            optimizer = build(reserve=memory.reserve)
            self.host_kinds = frozenset(optimizer.state())
            return optimizer
        with memory.allocating("moments", self._moment_sizes()):
            optimizer = build()
        memory.hold("moments", optimizer.tensors)
        return optimizer

    def _moment_sizes(self) -> list[int]:
        """Return the bytes of AdamW's moments; other optimizers have fewer, of other sizes."""
        trained = [one.nbytes for one in self.local.values() if one.requires_grad]
        return 2 * trained if self._is_adamw else []

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().fill(weights)
        if self._coded is not None:
            self._coded.update()

    def contract(self) -> dict[str, str | int]:
        return super().contract() | weights_fact(self._weights)

    def source(self, on_open: Callable[[], None] = do_nothing) -> WeightSource:
        if self._coded is not None and self._coded.scales:
            return CodedSource(self.local_weights(), self._coded, on_open)
        lora = self.scorer.model.lora
        if not lora.merged_push:
            return super().source(on_open)
        base = self.shards_of(name for name in self.parameters if name in self.base)
        return MergedSource(base, self.local_weights(), lora.scale, self.part, on_open)

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        has_logits = isinstance(self.scorer, Scorer)
        model = self.scorer.model
        return train_flops(model.spec, lengths, num_scored if has_logits else 0, model.lora)

    def forward_backward(self, micros: Sequence[MicroBatch], loss_of: LossOf, needs: Needs) -> None:
        with self._without_master() if self._offload == "master" else nullcontext():
            try:
                self._accumulate(micros, loss_of, needs)
            except BaseException:  # whatever is raised, a later step begins without these gradients
                self.discard()
                self._end_failed_pass()
                raise

    def _accumulate(self, micros: Sequence[MicroBatch], loss_of: LossOf, needs: Needs) -> None:
        def run(number: int) -> Tensor:
            return loss_of(number, self._outputs(micros[number], needs))

        finish = do_nothing if self._activations is None else self._activations.finish
        self._accumulation.run(len(micros), run, finish)

    @contextmanager
    def base_alone(self) -> Iterator[None]:
        self._is_base_alone = True
        try:
            with self.scorer.model.base_alone():
                yield
        finally:
            self._is_base_alone = False

    @property
    def replays(self) -> RouteShape | None:
        is_policy = isinstance(self.scorer, Scorer) and not self._is_base_alone
        return self._route_shape if is_policy else None

    @cached_property
    def _route_shape(self) -> RouteShape | None:
        return RouteShape.of(self.scorer.model.spec)

    @contextmanager
    def _without_master(self) -> Iterator[None]:
        """Gather all weights, and have the master weights asleep while those compute."""
        for unit in self.units:
            unit.unshard()
        self._memory.sleep(("master",))
        try:
            yield
        finally:
            self._free_gathered()
            self._memory.wake(("master",))

    def square_norm(self) -> float:
        for name, parameter in self.parameters.items():
            # An empty shard, of fewer rows than ranks, has nothing to update.
            if parameter.grad is not None and self.local[name].numel():
                grad = parameter.grad
                self.local[name].grad = grad.to_local() if isinstance(grad, DTensor) else grad
        gradients = self._named_gradients()
        uncut = {name for name in gradients if self.held[name].axis == ""}
        if self._tensors is not None:
            self._tensors.sum_uncut([gradients[name] for name in sorted(uncut)])
        if self._exact_norm_group is not None:
            counted = list(gradients.values())
            if self._tensors is not None:
                counted = self._tensors.counted(gradients, uncut)
            group, most = self._exact_norm_group, self.scorer.model.spec.num_parameters
            exact = exact_square_norm(counted, most, group)
            if exact is not None:
                return exact if group.rank() == 0 else 0.0
        by_copies = defaultdict[int, list[Tensor]](list)
        for name, gradient in gradients.items():
            by_copies[self.held[name].copies].append(gradient)
        return sum(_square_norm(found) / copies for copies, found in by_copies.items())

    def _gradients(self) -> list[Tensor]:
        return list(self._named_gradients().values())

    def _named_gradients(self) -> dict[str, Tensor]:
        return {name: one.grad for name, one in self.local.items() if one.grad is not None}

    def step(self, lr: float, grad_scale: float) -> None:
        self._memory.require("an optimizer step", "moments")
        if grad_scale != 1.0:
            torch._foreach_mul_(self._gradients(), grad_scale)
        self.optimizer.step(lr)
        if self._coded is not None:
            self._coded.update()
        self._memory.note_change("master")
        self.discard()

    def discard(self) -> None:
        for parameter in (*self.parameters.values(), *self.local.values()):
            parameter.grad = None
        discard_unreduced(self.units)

    def state(self) -> State:
        return {**super().state(), **self.optimizer.state()}

    def on_loaded(self, optimizer_steps: int) -> None:
        self.optimizer.on_loaded(optimizer_steps)
        if self._coded is not None:
            self._coded.update()


def _square_norm(gradients: Sequence[Tensor]) -> float:
    return float(nn.utils.get_total_norm(gradients)) ** 2


def _tag(cfg: TrainerConfig, is_base: bool) -> str:
    """Return the tag of the memory of the base, or of what learns."""
    if not is_base:
        return "master"
    return "pushed_base" if cfg.lora.merged_push else "base"


def _make_base(model: CausalLM, dtype: torch.dtype) -> frozenset[str]:
    """Have all but adapters stored in `dtype`, in which they compute; return their names."""
    base = {name: one for name, one in model.named_parameters() if not is_adapter(name)}
    for name in base.keys() - model.spec.fixed_names():
        base[name].data = base[name].data.to(dtype)
    return frozenset(base)


def _freeze(
    model: CausalLM, cfg: TrainerConfig, num_shards: int, base: Container[str]
) -> dict[str, UpdateRule]:
    """Have trained parameters alone take gradients, and return how each of them is updated."""
    fixed = model.spec.fixed_names()
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in base and name not in fixed
    }
    rules = update_rules(shapes, cfg, num_shards)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in rules)
    return rules
