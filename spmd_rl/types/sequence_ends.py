"""sequence_ends: a batch whose only scored states are those after whole sequences. numpy only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.batch import Batch


def sequence_ends(batch: Batch) -> Batch:
    """Return the batch with one token more at each end, and the mask on these tokens alone.

    A value belongs to the state before its token. So the value of an added token is that of the
    whole sequence, which is how reward models score it. The added token itself is never read. Its
    columns are those of the token before it. The loss becomes a mean over sequences, or over units
    where `batch.unit` is above 1.
    """
    ends = np.cumsum(batch.lengths)

    def extended(values: NDArray[Any]) -> NDArray[Any]:
        return np.insert(values, ends, 0, axis=0)

    columns = {
        name: np.insert(column, ends, column[ends - 1], axis=0)
        for name, column in batch.columns.items()
    }
    lengths = batch.lengths + np.int32(1)
    mask = np.zeros(batch.num_tokens + batch.num_sequences, np.bool_)
    mask[np.cumsum(lengths) - 1] = True
    return replace(
        batch,
        tokens=extended(batch.tokens),
        lengths=lengths,
        mask=mask,
        weight=mask.astype(np.float32),
        advantages=extended(batch.advantages),
        rollout_logprobs=extended(batch.rollout_logprobs),
        versions=np.where(mask, np.int32(-1), extended(batch.versions)),
        denominator=float(max(batch.num_sequences // batch.unit, 1)),
        columns=columns,
        kept=[],
    )
