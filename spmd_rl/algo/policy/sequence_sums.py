"""Sums, means and minima over the tokens of each sequence of a micro-batch, without gradients.

Each token gets the value of its whole sequence. A sequence is summed in the order of its tokens,
so the bits do not depend on what else is in the micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Reduction = Literal["sum", "mean", "min"]


def over_sequences(
    values: Tensor, sequence: Tensor, num_sequences: int, reduction: Reduction
) -> Tensor:
    """Return for each token the sum, mean or minimum of `values` over its sequence.

    Shape: `values` and the result are [M]; `sequence` is [M], as in `LossInput`.
    """
    import torch

    # `bincount` would make the host wait for the device
    numbers = torch.arange(num_sequences + 1, device=sequence.device)
    lengths = torch.searchsorted(sequence, numbers).diff()
    reduced = torch.segment_reduce(
        values.detach().contiguous(), reduction, lengths=lengths, unsafe=True
    )
    return reduced[sequence]
