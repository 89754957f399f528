"""Weights in the child: portions of the slab are copied into the scheduler's parameters.

SGLang fuses some of Hugging Face's tensors into one parameter. Where a rule knows the part of a
parameter that a tensor goes to, the boxes of a portion are copied straight into it. Other tensors
are collected, and loaded by SGLang's own `load_weights`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spmd_rl.errors import WeightsError
from spmd_rl.model.layers import gqa, mlp
from spmd_rl.model.layers.moe import is_of_expert
from spmd_rl.rollout.sglang.child_calls import ATTACH, DIGEST, RECEIVE, ChildContext, call
from spmd_rl.rollout.sglang.expert_views import expert_views
from spmd_rl.rollout.sglang.messages import PushedPieces, WeightDigests
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors
from spmd_rl.weights.plan.layout import Piece, whole_box
from spmd_rl.weights.proof.digest import digest
from spmd_rl.weights.slab.peer_socket import PortionEntry
from spmd_rl.weights.slab.portion_reader import Portion, PortionReader
from spmd_rl.weights.slab.slab import MappedSlab

DEADLINE_S = 600.0
# the parts of a fused parameter, in their order along its rows; SGLang gives it our own name
FUSED = {**gqa.FUSED, **mlp.FUSED}
PADDED = ("embed_tokens.weight", "lm_head.weight")  # SGLang adds rows to these

Pieces = Mapping[str, Piece]  # what a push brings of each tensor


def parameter_views(model: Any, pieces: Pieces) -> dict[str, Tensor]:
    """Return the part of a parameter that holds each piece, for those that a rule knows.

    There are none in a model that derives other values from its weights after loading, because
    only its `load_weights` does that.
    """
    if hasattr(model, "post_load_weights") or getattr(model, "quant_config", None) is not None:
        return {}
    views = dict(expert_views(model, pieces))
    for name, parameter in model.named_parameters():
        views |= _views_of(name, parameter.detach(), pieces)
    return views


def _views_of(name: str, parameter: Tensor, pieces: Pieces) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors whose pieces `parameter` consists of, with their parts of it."""
    parts = [name]
    for fused, separate in FUSED.items():
        if f".{fused}." in name:
            parts = [name.replace(f".{fused}.", f".{part}.") for part in separate]
    if any(part not in pieces for part in parts):
        return
    extents = [pieces[part].box.extent for part in parts]
    num_rows = sum(extent[0] for extent in extents if extent)
    fits = parameter.ndim > 0 and (
        num_rows == len(parameter) or (name.endswith(PADDED) and num_rows < len(parameter))
    )
    if not fits:
        return
    start = 0
    for part, extent in zip(parts, extents, strict=True):
        view = parameter[start : start + extent[0]]
        if tuple(view.shape) == extent and view.dtype == getattr(torch, pieces[part].dtype):
            yield part, view
        start += extent[0]


def check_rules(pieces: Pieces, views: Mapping[str, Tensor]) -> None:
    """Raises: WeightsError for a part of a tensor without a rule, and for a tensor of an expert.

    SGLang's `load_weights` takes whole tensors. It compares the name of each with those of all
    experts, so that the time for a layer grows with the square of their number.
    """
    for name, piece in pieces.items():
        if name not in views and is_of_expert(name):
            raise WeightsError(
                f"no rule says where SGLang keeps '{name}': leave engine.options.quantization out, "
                "and set engine.options.moe_runner_backend = 'triton'"
            )
        if name not in views and piece.box != whole_box(piece.shape):
            raise WeightsError(
                f"no rule says where SGLang keeps this rank's part of '{name}': set "
                "split.infer.tp = 1"
            )


@dataclass
class PushLoader:
    """Reads the portions of each push. `staged` are the tensors for `load_weights`, in the making,
    and `missing` says how many of their elements have not come.

    `received` are their digests, since no view of them is known afterwards. `loaded` are the names
    of all tensors that a push has brought; a later one may bring some of them alone. `complete` are
    the portions of the last push that brought all it had to.
    """

    context: ChildContext
    mapped: MappedSlab
    pieces: Pieces
    views: dict[str, Tensor]
    staged: dict[str, Tensor] = field(default_factory=dict)
    missing: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    complete: list[Portion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = PortionReader(self.mapped, self.context.socket, DEADLINE_S)

    @torch.no_grad()
    def receive(self) -> None:
        """Load the portions of one push. Blocks: until the last has come; the rank sends it."""
        self.staged, self.missing = {}, {}
        portions = []
        for portion in self._reader:
            self._load(portion)
            self._reader.ack(portion)
            portions.append(portion)
        if portions != self.complete:  # a push that repeats a complete one is complete
            self._check_complete(portions)
            self.complete = portions

    def _check_complete(self, portions: list[Portion]) -> None:
        """Raises: WeightsError unless each tensor came whole, or came before and not now."""
        counts: Counter[str] = Counter()
        for portion in portions:
            for entry in portion.entries:
                counts[entry.name] += entry.box.num_elements
        for name, piece in self.pieces.items():
            is_whole = counts[name] == piece.box.num_elements
            if not is_whole if name in counts else name not in self.loaded:
                raise WeightsError(f"a push brought only a part of '{name}'")
            self.loaded.add(name)

    def digests(self) -> WeightDigests:
        """Return the digest of every tensor, as the parameters hold it where a view is known."""
        held = {
            name: LocalTensor(self.pieces[name].shape, self.pieces[name].box, view)
            for name, view in self.views.items()
        }
        values = digest(LocalTensors(held)) | self.received
        triples = [(name, self.pieces[name].box, value) for name, value in values.items()]
        return WeightDigests(triples, sorted(self.received))

    def _load(self, portion: Portion) -> None:
        if len(self.views) == len(self.pieces):
            portion.copy(self._part)
            return
        parts = [self._part(entry) for entry in portion.entries]
        torch._foreach_copy_(parts, portion.tensors)
        for entry in portion.entries:
            if entry.name in self.staged:
                self.missing[entry.name] -= entry.box.num_elements
        complete = [name for name in self.staged if self.missing[name] <= 0]
        for name in complete:
            whole = self.staged.pop(name)
            self.received |= digest(LocalTensors.whole({name: whole}))
            self.context.model.load_weights([(name, whole)])

    def _part(self, entry: PortionEntry) -> Tensor:
        """Return what a box is copied into."""
        target = self._target(entry.name)
        return target[entry.box.within(self.pieces[entry.name].box)]

    def _target(self, name: str) -> Tensor:
        """Return the tensor that boxes of `name` are copied into."""
        if name in self.views:
            return self.views[name]
        if name not in self.pieces:
            raise WeightsError(f"a push brought '{name}', which was not announced")
        if name not in self.staged:
            piece = self.pieces[name]
            dtype, device = getattr(torch, piece.dtype), self.mapped.device
            self.staged[name] = torch.empty(piece.shape, dtype=dtype, device=device)
            self.missing[name] = piece.box.num_elements
        return self.staged[name]


@call(ATTACH)
def attach_slab(context: ChildContext) -> None:
    """Map the slab that the rank sends, and find the parameters that pushes go to."""
    message = context.socket.receive(DEADLINE_S)
    if not isinstance(message, PushedPieces):
        raise WeightsError(f"{type(message).__name__} came in place of the tensors of a push")
    device = next(iter(context.model.parameters())).device
    mapped = MappedSlab.receive(context.socket, device)
    pieces = {piece.name: piece for piece in message.pieces}
    views = parameter_views(context.model, pieces)
    check_rules(pieces, views)
    context.kept["receiver"] = PushLoader(context, mapped, pieces, views)


@call(RECEIVE)
def receive_weights(context: ChildContext) -> None:
    """Load one push, and forget all K/V. Raises: WeightsError while the scheduler works."""
    receiver: PushLoader = context.kept["receiver"]
    receiver.receive()
    if not context.scheduler.flush_cache():
        raise WeightsError("the scheduler was not idle during a push")


@call(DIGEST)
def digest_weights(context: ChildContext) -> None:
    """Send the digests of what the parameters hold."""
    receiver: PushLoader = context.kept["receiver"]
    context.socket.send(receiver.digests())
