"""Self-check of a recipe with a reference model: before the first step, it equals the policy."""

from __future__ import annotations

import numpy as np

from spmd_rl.errors import ContractError
from spmd_rl.types.token_values import TokenValues

TOLERANCE = 1e-8  # nats


def check_reference(
    policy: TokenValues, reference: TokenValues, tolerance: float = TOLERANCE
) -> None:
    """Refuse a reference model that is not the policy, as both score one batch at step 0.

    Call it before the first train step: later they differ.
    Raises: ContractError naming the largest difference of a log-prob, if it is above `tolerance`.
    """
    if not np.array_equal(policy.lengths, reference.lengths):
        raise ContractError("policy and reference scored different batches: score the same one")
    distance = np.abs(policy.values.astype(np.float64) - reference.values)
    if len(distance) and not distance.max() <= tolerance:
        token = int(np.argmax(np.where(np.isnan(distance), np.inf, distance)))
        sequence = int(np.searchsorted(np.cumsum(policy.lengths), token, side="right"))
        raise ContractError(
            "policy and reference differ before the first step, so one of them has other weights "
            f"or another numeric contract: by {distance[token]:.3g} nats at token "
            f"{token - int(policy.lengths[:sequence].sum())} of sequence {policy.index[sequence]}"
        )
