"""What the train step asks of whatever computes gradients.

A backend knows a model, its parallel layout and its optimizer; it knows no advantage, clip range or
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
from spmd_rl.weights.local_tensors import LocalTensor, LocalTensors

# by kind, "weights" among them; a name may come several times
State = Mapping[str, Sequence[tuple[str, LocalTensor]]]


class Backend(Protocol):
    """Every method is called by all ranks of the trainer together. `device` is where micro-batches
    go, `max_positions` the longest sequence the model takes."""

    device: torch.device
    max_positions: int

    def contract(self) -> dict[str, str | int]:
        """What the forward pass's bits depend on, besides the weights (kernels/contract.py)."""
        ...

    def flops(self, lengths: NDArray[np.int32], num_scored: int) -> float:
        """Operations of a forward and backward pass over sequences of these lengths, `num_scored`
        tokens scored.
        """
        ...

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probability, with its graph where gradients are enabled, and entropy of the scored
        tokens.

        Shape: both [M] fp32.
        """
        ...

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of `loss`, a scalar, summed over the ranks: what losses are divided by
        is settled before.

        `last` says that the gradients are complete with it.
        """
        ...

    def square_norm(self) -> float:
        """This rank's share of the squared gradient norm; the shares of all ranks add up to the
        whole.
        """
        ...

    def step(self, lr: float, grad_scale: float) -> None:
        """One optimizer step on the gradients that `square_norm` saw, times `grad_scale`; they are
        then forgotten.
        """
        ...

    def discard(self) -> None:
        """Forget the gradients."""
        ...

    def state(self) -> State:
        """This rank's weights and optimizer state, the memory itself: a checkpoint reads it, and
        fills it in place.
        """
        ...

    def loaded(self, optimizer_steps: int) -> None:
        """`state` was filled from a checkpoint taken after `optimizer_steps`."""
        ...

    def local_tensors(self) -> LocalTensors:
        """This rank's share of the master weights: the memory that `step` updates in place."""
        ...

    def full(self, name: str) -> Tensor:
        """One whole parameter of `local_tensors`, gathered on every rank."""
        ...
