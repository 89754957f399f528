"""Backend protocols: what a frozen model and a train step ask of whatever computes.

A backend has a model, its parallel layout and, to train it, an optimizer. It knows no advantage,
clip range or metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.algo.losses import Needs
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.model.layers.route_replay import RouteReplay
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.weights.ends import WeightSource
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import Piece, PiecesByKind

NamedTensors = Sequence[tuple[str, LocalTensor]]  # a name may come several times
State = Mapping[str, NamedTensors]  # by kind, "weights" among the kinds


def pieces_of_ranks(
    state: State, context: RoleContext, group: ProcessGroup | None = None
) -> list[PiecesByKind]:
    """Return which pieces every rank of a role has. Ranks: all of the role."""
    own = {kind: [one.piece(name) for name, one in tensors] for kind, tensors in state.items()}
    blobs = context.all_gather_bytes(msgspec.msgpack.encode(own), group)
    return [msgspec.msgpack.decode(blob, type=dict[str, list[Piece]]) for blob in blobs]


@dataclass(frozen=True)
class Outputs:
    """What a forward pass computes of the scored tokens of a micro-batch.

    A language model has `logprobs` and `entropy`, and `candidate_logprobs` where `Needs` asks. With
    experts it has `routes` too (kernels/moe/route_hash.py). A model with a value head has `values`
    alone. Both may have `loads` of experts, and the `replay` of recorded ones.
    Shape: [M] fp32; `candidate_logprobs` is [M, K]; `routes` is [M] int32.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    candidate_logprobs: Tensor | None = None
    values: Tensor | None = None
    routes: Tensor | None = None
    loads: ExpertLoads | None = None
    replay: RouteReplay | None = None

    def detached(self) -> Outputs:
        """Return the same tensors without gradients, each contiguous."""
        tensors: dict[str, Any] = {
            name: one.detach().contiguous()
            for name, one in vars(self).items()
            if isinstance(one, Tensor)
        }
        return replace(self, **tensors)


Visit = Callable[[int, Outputs], None]
VisitTop = Callable[[int, tuple[Tensor, Tensor]], None]
LossOf = Callable[[int, Outputs], Tensor]


class ModelBackend(Protocol):
    """Weights and forward pass of one model. All ranks of its role call each method together.

    `device` is where micro-batches go, `max_positions` the longest sequence that the model takes.
    `host_kinds` are the kinds of `state` that lie in host memory, though the model computes on a
    GPU.
    `compares_bits` says that its log-probs can have the bits of an engine's.
    `packs_whole` says that micro-batches must not share prompts among sequences. `replays` is the
    shape of the routes that a pass takes from a batch, None where its own router chooses.
    """

    device: torch.device
    max_positions: int
    host_kinds: frozenset[str]
    packs_whole: bool
    compares_bits: bool

    @property
    def replays(self) -> RouteShape | None: ...

    @property
    def gradients(self) -> str:
        """What computes gradients, in words that a checkpoint keeps."""
        ...

    def contract(self) -> dict[str, str | int]:
        """Return what the forward's bits depend on besides the weights (kernels/contract.py)."""
        ...

    def forward(self, micros: Sequence[MicroBatch], visit: Visit, needs: Needs) -> None:
        """Run the micro-batches without gradients.

        `visit` gets the number of each and its outputs, in any order.
        """
        ...

    def top_logprobs(self, micros: Sequence[MicroBatch], num_top: int, visit: VisitTop) -> None:
        """Find the `num_top` likeliest tokens at each scored position, without gradients.

        `visit` gets the number of each micro-batch, and their ids and log-probs.
        Shape: both [M, K], int32 and fp32. Raises: ContractError where the model has none.
        """
        ...

    def state(self) -> State:
        """Return this rank's weights and optimizer state.

        The tensors are the memory itself: a checkpoint reads it, and is loaded into it.
        """
        ...

    def on_loaded(self, optimizer_steps: int) -> None:
        """Go on from a `state` that was loaded, taken after `optimizer_steps`."""
        ...

    def source(self, on_open: Callable[[], None]) -> WeightSource:
        """Return this rank's share of the weights: of a trainer, as `step` leaves them.

        `on_open` is called before each push.
        """
        ...

    def names(self) -> Sequence[str]:
        """Return the names of all parameters, in the order of the model."""
        ...

    def gather(self, name: str) -> Tensor:
        """Return one whole parameter, on every rank."""
        ...


class Backend(ModelBackend, Protocol):
    """Gradients and optimizer of one model besides."""

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        """Return the operations of a forward and backward pass over sequences of these lengths,
        with `num_scored` tokens scored.
        """
        ...

    def forward_backward(self, micros: Sequence[MicroBatch], loss_of: LossOf, needs: Needs) -> None:
        """Compute the gradients of an optimizer step, summed over the ranks and not averaged.

        `loss_of` gets the number of each micro-batch and its outputs, and returns the loss of this
        rank's share, a scalar. A backend may run several micro-batches at once, as a pipeline does.
        If this raises, no gradients are left.
        """
        ...

    def base_alone(self) -> AbstractContextManager[None]:
        """Return a context in which `forward` computes without adapters."""
        ...

    def square_norm(self) -> float:
        """Return this rank's share of the squared gradient norm; all shares add up to the whole."""
        ...

    def step(self, lr: float, grad_scale: float) -> None:
        """Take one optimizer step on the gradients times `grad_scale`, and discard them.

        `square_norm` is called before.
        """
        ...

    def discard(self) -> None:
        """Discard the gradients."""
        ...
