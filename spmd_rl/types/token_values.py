"""Values for each token of a batch, as a role returns them. numpy only."""

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
