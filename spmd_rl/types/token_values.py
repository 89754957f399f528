"""Values for each token or sequence of a batch, as a role returns them. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import entry_indices


@dataclass(frozen=True)
class TokenValues:
    """A value, or K of them, for each token of a batch or of a part of it.

    `Trainer.score` returns log-probs so. Values are zero outside the batch's mask.
    Shape: `values` is [T] or [T, K]; `lengths`, `index` are [N], as in `Batch`.
    """

    values: NDArray[np.float32 | np.int32]
    lengths: NDArray[np.int32]
    index: NDArray[np.int32]

    @staticmethod
    def join(parts: list[TokenValues]) -> TokenValues:
        """Join the parts in the order of the batch before it was split."""
        lengths = np.concatenate([part.lengths for part in parts])
        index = np.concatenate([part.index for part in parts])
        order = np.argsort(index, kind="stable")
        values = np.concatenate([part.values for part in parts])
        return TokenValues(values[entry_indices(lengths, order)], lengths[order], index[order])


@dataclass(frozen=True)
class TopLogprobs:
    """The K likeliest tokens before each token of a batch, best first, and their log-probs.

    Shape: both are values [T, K], of int32 and of float32.
    """

    ids: TokenValues
    logprobs: TokenValues

    @staticmethod
    def join(parts: list[TopLogprobs]) -> TopLogprobs:
        """Join the parts in the order of the batch before it was split."""
        return TopLogprobs(
            TokenValues.join([part.ids for part in parts]),
            TokenValues.join([part.logprobs for part in parts]),
        )


@dataclass(frozen=True)
class SequenceValues:
    """A value for each sequence of a batch or of a part of it.

    Shape: `values`, `index` are [N], the latter as in `Batch`.
    """

    values: NDArray[np.float32]
    index: NDArray[np.int32]

    @staticmethod
    def join(parts: list[SequenceValues]) -> SequenceValues:
        """Join the parts in the order of the batch before it was split."""
        index = np.concatenate([part.index for part in parts])
        order = np.argsort(index, kind="stable")
        values = np.concatenate([part.values for part in parts])
        return SequenceValues(values[order], index[order])
