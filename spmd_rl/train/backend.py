"""Backend protocol: what the train step asks of whatever computes gradients.

A backend has a model, its parallel layout and its optimizer. It knows no advantage, clip range or
metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.train.microbatch import MicroBatch
from spmd_rl.weights.ends import WeightSource
from spmd_rl.weights.local_tensors import LocalTensor

# tensors by kind, "weights" among the kinds; a name may come several times
State = Mapping[str, Sequence[tuple[str, LocalTensor]]]


class Backend(Protocol):
    """Gradients and optimizer of one model. All ranks of the trainer call each method together.

    `device` is where micro-batches go, `max_positions` the longest sequence that the model takes.
    """

    device: torch.device
    max_positions: int

    def contract(self) -> dict[str, str | int]:
        """Return what the forward's bits depend on besides the weights (kernels/contract.py)."""
        ...

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        """Return the operations of a forward and backward pass over sequences of these lengths,
        with `num_scored` tokens scored.
        """
        ...

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of the scored tokens.

        The log-probability has its graph where gradients are enabled.
        Shape: both [M] fp32.
        """
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, a scalar, summed over the ranks and not averaged.

        `last` says that the gradients are complete with it.
        """
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

    def state(self) -> State:
        """Return this rank's weights and optimizer state.

        The tensors are the memory itself: a checkpoint reads it, and is loaded into it.
        """
        ...

    def on_loaded(self, optimizer_steps: int) -> None:
        """Go on from a `state` that was loaded, taken after `optimizer_steps`."""
        ...

    def source(self) -> WeightSource:
        """Return this rank's share of the master weights, as `step` leaves them."""
        ...

    def names(self) -> Sequence[str]:
        """Return the names of all parameters, in the order of the model."""
        ...

    def gather(self, name: str) -> Tensor:
        """Return one whole parameter, on every rank."""
        ...
