"""ShardedModel: a model's weights sharded with FSDP2, and its forward pass.

One mesh axis of size one is plain FSDP. dp x fsdp is HSDP, which shards within fsdp and replicates
over dp. A frozen model is no more than this; a trainer adds gradients and an optimizer (fsdp2.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from spmd_rl.algo.losses import Needs
from spmd_rl.errors import ContractError
from spmd_rl.kernels.moe.route_hash import hashed_routes
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.attention import backend_of
from spmd_rl.model.held.held import TRAINER, held_tensors
from spmd_rl.model.held.tensor import Along, HeldTensor
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.model.layers.route_replay import RouteReplay
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.scorer import Scorer
from spmd_rl.model.spec import Head
from spmd_rl.model.value_head import ValueScorer
from spmd_rl.train.backend import Outputs, State, Visit, VisitTop
from spmd_rl.train.fsdp2.sharing import ALONE, Sharing
from spmd_rl.train.fsdp2.units import forget_pass, mixed_precision, modules_of_units, shard
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.weights.ends import WeightSource
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Layout
from spmd_rl.weights.proof.digest import base_fact, combine, digest
from spmd_rl.weights.tensor_ends import TensorSource, do_nothing

Allocating = Callable[[bool, list[int]], AbstractContextManager[None]]


class ShardedModel:
    """The model of a scorer on the meta device, sharded over `mesh`, whose axes are dp and fsdp.

    It computes in `dtype`. Weights are unset until `fill`. Those that `base` names never change:
    `state`, `source` and `names` leave them out. FSDP leaves them alone where there is one shard,
    for it would hold them twice. Every rank has the fixed parameters whole. `allocating` is entered
    to allocate the base, and to allocate the rest; its arguments say which, and how many bytes each
    tensor takes. As `sharing` says, a rank has experts of its own or a part of each matrix, or
    computes its own rows of each micro-batch.
    """

    gradients = "fsdp2"
    balances = False  # whether passes keep what the loss that balances experts is made of

    def __init__(
        self,
        scorer: Scorer | ValueScorer,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        gathers_whole: Callable[[int], bool],
        reshard_after_forward: bool | None = None,
        base: Collection[str] = (),
        allocating: Allocating = lambda is_base, sizes: nullcontext(),
        sharing: Sharing = ALONE,
    ) -> None:
        spec = scorer.model.spec
        self.device = device
        self._dtype = dtype
        self.max_positions = spec.max_positions
        self.compares_bits = spec.impl == "native"
        if self.compares_bits:
            backend_of(spec, dtype, device, scorer.attention_split)  # refuses what cannot run
        self.packs_whole = not self.compares_bits  # transformers takes whole sequences
        self.host_kinds: frozenset[str] = frozenset()
        self.num_replicas = mesh.size(0)
        self.num_shards, self.shard = mesh.size(1), mesh.get_local_rank("fsdp")
        self.scorer = scorer
        self.base = frozenset(base)
        self.base_fact: dict[str, str | int] = {}
        self._sharing = sharing
        self._experts, self._tensors = sharing.experts, sharing.tensors
        self._sequences = sharing.sequences
        self.held = self._held_tensors()
        if self._experts is not None:
            self._experts.split(scorer.model)
        self.units = self._make_units(mesh, gathers_whole, reshard_after_forward)
        if isinstance(scorer, Scorer):
            register_fsdp_forward_method(scorer, "top_logprobs")
        self._materialise(allocating)
        self.parameters = dict(scorer.model.named_parameters())
        self.local = {
            name: nn.Parameter(_own(parameter).detach(), parameter.requires_grad)
            for name, parameter in self.parameters.items()
        }

    def _held_tensors(self) -> dict[str, HeldTensor]:
        """Return what this rank has of each parameter of the whole model, in the model's order.

        Experts are not split yet.
        """
        model = self.scorer.model
        seat = self._sharing.seat(Along(self.shard, self.num_shards), self.num_replicas)
        head: Head = "lm" if isinstance(self.scorer, Scorer) else "value"
        held = held_tensors(model.spec, seat, TRAINER, head, model.lora.tensors(model.spec))
        return {name: held[name] for name, _ in model.named_parameters()}

    def _make_units(
        self, mesh: DeviceMesh, gathers_whole: Callable[[int], bool], reshard: bool | None
    ) -> list[FSDPModule]:
        """Have FSDP shard the model; the experts of each layer are a unit if ranks share them."""
        named, experts = dict(self.scorer.model.named_parameters()), self._experts
        whole = {named[name] for name in self._whole_names()}
        units: list[FSDPModule] = []
        if experts is not None and experts.num_shards > 1:
            policy = mixed_precision((), torch.float32)
            units = shard(experts.modules, experts.mesh, policy, reshard, set())
        num_bytes = sum(one.nbytes for one in self.scorer.parameters() if one not in whole)
        modules = modules_of_units(self.scorer, experts is None and gathers_whole(num_bytes))
        policy = mixed_precision((one for one in named.values() if one not in whole), self._dtype)
        axes = mesh if mesh.size(0) > 1 else mesh["fsdp"]
        return units + shard(modules, axes, policy, reshard, whole)

    def _materialise(self, allocating: Allocating) -> None:
        """Give all parameters memory: of the base, and of the rest, inside one context each.

        FSDP pads uneven shards when they are applied, which allocates too.
        """
        named = dict(self.scorer.model.named_parameters())
        memory: dict[Tensor, Tensor] = {}
        for is_base in sorted({name in self.base for name in named}, reverse=True):
            chosen = [one for name, one in named.items() if (name in self.base) == is_base]
            with allocating(is_base, [_own(one).nbytes for one in chosen]):
                for parameter in chosen:
                    memory[parameter] = torch.empty_like(parameter, device=self.device)
                if not is_base:
                    self.scorer._apply(partial(_placed, memory, self.device))

    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set the weights from whole tensors by name, of which each rank keeps its part."""
        with torch.no_grad():
            for name, whole in weights:
                if name not in self.local:
                    continue
                box = self.held[name].box
                self.local[name].copy_(whole[tuple(map(slice, box.offset, box.end))])

    @property
    def replays(self) -> RouteShape | None:
        """None: routes that an engine recorded are those of a policy."""
        return None

    def contract(self) -> dict[str, str | int]:
        """Return what the forward pass's bits depend on besides the weights."""
        facts = self.scorer.model.contract(self.device, self._dtype, self.scorer.attention_split)
        return facts | self.base_fact

    def forward(self, micros: Sequence[MicroBatch], visit: Visit, needs: Needs) -> None:
        with torch.no_grad(), self._gathering():
            for number, micro in enumerate(micros):
                visit(number, self._outputs(micro, needs))

    def top_logprobs(self, micros: Sequence[MicroBatch], num_top: int, visit: VisitTop) -> None:
        """Find the `num_top` likeliest tokens at each scored position, without gradients.

        `visit` gets the number of each micro-batch, their ids and their log-probs.
        """
        if not isinstance(self.scorer, Scorer):
            raise ContractError("a model with a value head has no log-probs to score with")
        vocab_size = self.scorer.model.spec.vocab_size
        if not 1 <= num_top <= vocab_size:
            raise ContractError(f"k = {num_top}: the model has {vocab_size} tokens to choose from")
        with torch.no_grad(), self._gathering():
            for number, micro in enumerate(micros):
                visit(number, self._top_logprobs(micro, num_top))

    def _top_logprobs(self, micro: MicroBatch, num_top: int) -> tuple[Tensor, Tensor]:
        own = None if self._sequences is None else self._sequences.part(micro)
        rows = micro if own is None else own.micro
        self._prepare_mixtures(rows)
        ids, logprobs = cast(Scorer, self.scorer).top_logprobs(rows, num_top)
        return (ids, logprobs) if own is None else (own.joined(ids), own.joined(logprobs))

    def _outputs(self, micro: MicroBatch, needs: Needs) -> Outputs:
        """Return the outputs of a micro-batch, the same on all ranks that share its tokens."""
        if self._sequences is None:
            return self._outputs_of_rows(micro, needs)
        own = self._sequences.part(micro)
        return own.outputs(self._outputs_of_rows(own.micro, needs))

    def _outputs_of_rows(self, micro: MicroBatch, needs: Needs) -> Outputs:
        loads, replay = self._prepare_mixtures(micro)
        if isinstance(self.scorer, ValueScorer):
            return Outputs(values=self.scorer(micro), loads=loads)
        candidates = micro.columns["candidates"].long() if needs.candidates else None
        with hashed_routes() as routes:
            scores = self.scorer(micro, entropy_grad=needs.entropy, candidates=candidates)
        hashes = routes.of_rows(micro.rows)
        return replace(Outputs(*scores), routes=hashes, loads=loads, replay=replay)

    def _prepare_mixtures(self, micro: MicroBatch) -> tuple[ExpertLoads | None, RouteReplay | None]:
        """Have mixtures count their loads, and replay the recorded routes of a micro-batch."""
        loads = ExpertLoads(micro.num_tokens, self.balances) if self._mixtures else None
        replay = None
        if self.replays is not None and micro.experts is not None:
            replay = RouteReplay(micro.experts, self.replays.num_layers)
        for layer in self._mixtures:
            layer.loads, layer.replay = loads, replay
            if replay is not None:
                replay.join(layer)
        return loads, replay

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Free the gathered weights at the end, whatever is raised before."""
        try:
            yield
        except BaseException:  # whatever is raised, a later pass begins without these weights
            self._end_failed_pass()
            raise
        self._free_gathered()

    def _end_failed_pass(self) -> None:
        """Have FSDP forget a pass that raised, and free its gathered weights."""
        forget_pass(self.units)
        self._free_gathered()

    def _free_gathered(self) -> None:
        """Free the gathered weights.

        Without a backward pass nothing else does: they would take memory, and be stale after a
        load.
        """
        for unit in self.units:
            unit.reshard()

    def state(self) -> State:
        return {"weights": list(self.local_weights().items())}

    def on_loaded(self, optimizer_steps: int) -> None: ...

    def source(self, on_open: Callable[[], None] = do_nothing) -> WeightSource:
        return TensorSource(self.local_weights().items(), on_open)

    def names(self) -> list[str]:
        return [name for name in self.held if name not in self.base]

    def gather(self, name: str) -> Tensor:
        """Return one whole parameter, on every rank."""
        part = self.part(name) if name in self.parameters else None
        return self._sharing.whole(self.held[name], part, self.device)

    def part(self, name: str) -> Tensor:
        """Return what this rank and those that shard a parameter with it have together.

        Ranks: those. Blocks: until each has called.
        """
        parameter = self.parameters[name]
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def local_weights(self) -> LocalTensors:
        """Return this rank's shards of the weights."""
        return self.shards_of(name for name in self.names() if name in self.local)

    def note_base(self, context: RoleContext) -> None:
        """Have the contract name the base weights, which are set. Ranks: all of the role."""
        shards = self.shards_of(sorted(self.base & self.local.keys()))
        self.base_fact = base_fact(_digests(shards, context))

    def shards_of(self, names: Iterable[str]) -> LocalTensors:
        """Return this rank's shards of these parameters."""
        return LocalTensors(
            {
                name: LocalTensor(self.held[name].spec.shape, self.held[name].box, self.local[name])
                for name in names
            }
        )

    @cached_property
    def _mixtures(self) -> list[MoeMlp]:
        return [one for one in self.scorer.modules() if isinstance(one, MoeMlp)]

    def _whole_names(self) -> frozenset[str]:
        """Return the parameters of this rank that FSDP leaves alone."""
        return frozenset(
            name
            for name, row in self.held.items()
            if row.is_here and row.shards.size == 1
            if row.spec.is_fixed or row.axis == "ep" or name in self.base
        )


def _placed(memory: Mapping[Tensor, Tensor], device: torch.device, one: Tensor) -> Tensor:
    """Return the memory of a parameter, or a buffer on the device."""
    return memory[one] if one in memory else one.to(device)


def _own(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, the memory itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _digests(shards: LocalTensors, context: RoleContext) -> dict[str, int]:
    """Return the digests of tensors of which each rank of a role has its shards."""
    own = msgspec.msgpack.encode((shards.layout(context.rank), digest(shards)))
    parts = [
        msgspec.msgpack.decode(blob, type=tuple[Layout, dict[str, int]])
        for blob in context.all_gather_bytes(own)
    ]
    return combine(parts)
