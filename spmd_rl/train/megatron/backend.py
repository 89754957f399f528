"""Megatron-core backend: a model cut along tp, pp, cp and ep, with its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.algo.losses import Needs
from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.families.megatron import OUTPUT, WORD_EMBEDDING
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.model_contract import model_contract, rope_tables
from spmd_rl.model.parts.part import vocab_part_rows
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.backend import LossOf, Outputs, State, Visit, VisitTop
from spmd_rl.train.config import TrainerConfig, megatron_settings
from spmd_rl.train.cost.flops import train_flops
from spmd_rl.train.megatron.config import MegatronConfig, check_layout
from spmd_rl.train.megatron.exact import has_engine_bits
from spmd_rl.train.megatron.gather import GatheredTensors
from spmd_rl.train.megatron.groups import cut_along, groups_of, seat_of
from spmd_rl.train.megatron.library import (
    prepare_megatron,
    require_transformer_engine,
    running_on,
)
from spmd_rl.train.megatron.model import build_chunks, check_names, transformer_config
from spmd_rl.train.megatron.optimizer import MegatronOptimizer
from spmd_rl.train.megatron.parameters import boxes_of, parameters_of
from spmd_rl.train.megatron.schedule import PipelineSchedule
from spmd_rl.train.megatron.scores import VocabularyHead
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.train.optimizer.adamw import MOMENTS
from spmd_rl.train.optimizer.parameter_groups import update_rules
from spmd_rl.weights.tensor_ends import TensorSource


class Megatron:
    """The chunks of a model that one rank has. Weights are unset until `fill`.

    Weights, gradients and masters are in a region of `memory`, and moments in another one.
    All ranks of the role call each method together.
    """

    replays: RouteShape | None = None

    def __init__(
        self,
        spec: ModelSpec,
        context: RoleContext,
        cfg: TrainerConfig,
        memory: RoleMemory | None = None,
    ) -> None:
        self._settings = megatron_settings(cfg)
        _refuse_what_is_missing(cfg, context)
        axes = context.placement.axes
        check_layout(spec, axes, self._settings, context.placement.name)
        self._library = _prepare(self._settings, context.device)
        self.device, self.max_positions = context.device, spec.max_positions
        self._spec, self._cfg, self._axes = spec, cfg, axes
        self._dtype = getattr(torch, cfg.dtype)
        self._layers = self._settings.layers
        self.host_kinds = frozenset(MOMENTS if self._settings.offload == "moments" else ())
        # transformer-engine's attention knows no prompts that sequences share
        self.compares_bits = True
        self.packs_whole = self._layers == "transformer_engine"
        self._groups = groups_of(context)
        memory = memory or RoleMemory(None, context.device)
        with self._running(), memory.allocating("master"):
            chunks, config = self._build_chunks(context)
            self._parameters = parameters_of(chunks, spec, seat_of(context))
            self._models = [_wrapped(one, config, self._settings, self._groups) for one in chunks]
            self._boxes = boxes_of(self._parameters)
            self._optimizer = self._build_optimizer()
        with self._running(), memory.allocating("moments"):
            self._optimizer.allocate(memory.reserve)
        memory.hold("master", self._weights_and_gradients)
        memory.hold("moments", self._optimizer.moments)
        self.schedule = self._build_schedule(context, config, chunks[-1])
        self._gathered = GatheredTensors(context, self.device)

    def _build_optimizer(self) -> MegatronOptimizer:
        rules = update_rules(self._spec.trainable_shapes(), self._cfg, num_shards=1)
        return MegatronOptimizer(
            self._models, self._parameters, rules, self._cfg, self._settings, self._groups
        )

    def _build_schedule(
        self, context: RoleContext, config: Any, last_chunk: Any
    ) -> PipelineSchedule:
        """Return what runs micro-batches through the chunks of all stages."""
        spec = self._spec
        tables = rope_tables(spec)
        return PipelineSchedule(
            spec=spec,
            chunks=self._models,
            config=config,
            groups=self._groups,
            context=cut_along(context, "cp"),
            head=_head(last_chunk, spec, self._groups, self._settings.recomputes_layers),
            rope_tables=(tables[0].to(self.device), tables[1].to(self.device)),
            logit_rows=self._cfg.logit_rows,
            layers=self._layers,
        )

    def _build_chunks(self, context: RoleContext) -> tuple[list[Any], Any]:
        """Return this rank's chunks, and their `TransformerConfig`. The vocabulary is padded."""
        spec, settings = self._spec, self._settings
        num_ranks = cut_along(context, "tp").size
        padded_vocab = -(-spec.vocab_size // num_ranks) * num_ranks
        config = transformer_config(spec, settings, self._axes, self._dtype, self.device)
        return build_chunks(spec, settings, config, self._groups, padded_vocab), config

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights from whole tensors by name, of which each rank keeps its boxes."""
        masters: dict[str, list[Any]] = {}
        for name, tensor in self.state()["weights"]:
            masters.setdefault(name, []).append(tensor)
        with torch.no_grad():
            for name, whole in weights:
                for one in masters.get(name, ()):
                    one.local.copy_(whole[one.box.index])
            with self._running():
                self._optimizer.write_weights()

    def contract(self) -> dict[str, str | int]:
        """Return what the forward pass's bits depend on besides the weights."""
        tables = rope_tables(self._spec)
        facts = model_contract(self._spec, tables, self.device, self._dtype)
        if has_engine_bits(self._spec, self._axes, self._settings):
            return facts
        set_options = self._settings.model_options
        options = "".join(f", {name}={value}" for name, value in set_options.items())
        return facts | {"network": f"{self.gradients}{options}"}

    @property
    def gradients(self) -> str:
        """The library, its layers and how they are cut."""
        axes = ("tp", "pp", "cp", "ep", "etp")
        cuts = " x ".join(f"{axis} {self._axes.get(axis, 1)}" for axis in axes)
        return f"{self._library}, {self._layers} layer spec, {cuts}"

    def forward(self, micros: Sequence[MicroBatch], visit: Visit, needs: Needs) -> None:
        def on_outputs(number: int, outputs: Outputs) -> None:
            visit(number, outputs)

        with torch.no_grad(), self._running():
            self.schedule.run(micros, on_outputs, needs, backward=False)

    def forward_backward(self, micros: Sequence[MicroBatch], loss_of: LossOf, needs: Needs) -> None:
        from megatron.core.distributed import finalize_model_grads

        with self._running():
            for model in self._models:
                model.zero_grad_buffer()
            self.schedule.run(micros, loss_of, needs, backward=True)
            finalize_model_grads(self._models, None, pg_collection=self._groups)

    def top_logprobs(self, micros: Sequence[MicroBatch], num_top: int, visit: VisitTop) -> None:
        raise ContractError(
            "a trainer of Megatron-core has no top log-probs: a frozen model has them"
        )

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        return train_flops(self._spec, lengths, num_scored)

    def base_alone(self) -> AbstractContextManager[None]:
        """Raise a ContractError: there are no adapters, so no base beside them."""
        raise ContractError("the Megatron backend has no adapters to switch off")

    def square_norm(self) -> float:
        with self._running():
            return self._optimizer.square_norm()

    def step(self, lr: float, grad_scale: float) -> None:
        with self._running():
            self._optimizer.step(lr, grad_scale)

    def discard(self) -> None:
        """Discard the gradients: the next pass sets their buffers to zero before it adds."""

    def state(self) -> State:
        return self._optimizer.state()

    def on_loaded(self, optimizer_steps: int) -> None:
        with self._running():
            self._optimizer.on_loaded(optimizer_steps)

    def source(self, on_open: Callable[[], None]) -> TensorSource:
        """Return the weights as the model computes with them: many boxes of each tensor."""
        return TensorSource(self._boxes, on_open)

    def _weights_and_gradients(self) -> Iterator[Tensor]:
        yield from self._optimizer.weights()
        for model in self._models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                yield buffer.grad_data

    def _running(self) -> AbstractContextManager[None]:
        return running_on(self.device, self._groups.tp)

    def names(self) -> list[str]:
        return list(self._spec.parameter_shapes())

    def gather(self, name: str) -> Tensor:
        """Return one whole parameter in float32, on every rank."""
        return self._gathered.whole(name, self.state()["weights"])


def _refuse_what_is_missing(cfg: TrainerConfig, context: RoleContext) -> None:
    """Raise a ConfigError for a setting that this backend does not keep on GPUs."""
    if cfg.deterministic and context.device.type == "cuda":
        raise ConfigError(
            "trainer.deterministic = true on GPUs is not built for Megatron-core: "
            "trainer.backend.kind = 'fsdp2' has it"
        )


def _prepare(cfg: MegatronConfig, device: torch.device) -> str:
    """Import what the layers need, and return the versions."""
    found = f"megatron-core {prepare_megatron()}"
    if cfg.layers == "transformer_engine":
        found += f" with {require_transformer_engine(device)}"
    return found


def _wrapped(chunk: Any, config: Any, cfg: MegatronConfig, groups: Any) -> Any:
    """Return the chunk with buffers for its gradients, which are summed and not averaged."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    check_names("ddp_options", cfg.ddp_options, DistributedDataParallelConfig)
    own = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=cfg.distributed_optimizer,
        **cfg.ddp_options,
    )
    return DistributedDataParallel(config, own, chunk, pg_collection=groups)


def _head(chunk: Any, spec: ModelSpec, groups: Any, recomputes: bool) -> VocabularyHead | None:
    """Return the head, which is on the last stage's last chunk."""
    named = dict(chunk.named_parameters())
    if groups.pp.rank() != groups.pp.size() - 1:
        return None
    weight = named[OUTPUT] if OUTPUT in named else named[WORD_EMBEDDING]
    part_rows = vocab_part_rows(spec, spec.row_shards)
    return VocabularyHead(weight, spec.vocab_size, part_rows, groups.tp, recomputes)
