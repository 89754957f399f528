"""Training batch: sequences laid end to end, with what the loss needs of each token. numpy only.

Shape letters used here and in docstrings elsewhere: N sequences of a batch, T tokens of all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import entry_indices
from spmd_rl.types.partition import balanced_partition


@dataclass(frozen=True)
class Batch:
    """Sequences ready to train on, laid end to end.

    `mask` marks the tokens that the loss uses. Log-probs and advantages at position t belong to
    token t, which is predicted from the tokens before it in its sequence. So the first token of a
    sequence is never in the mask.

    The loss is sum(weight * per-token loss) / denominator. `weight` and `denominator` are fixed
    for the whole batch before it is split over ranks and micro-batches. So the loss does not depend
    on either split.

    `versions` holds the version of the weights that drew each token, -1 for tokens that no engine
    drew. `index` is a sequence's position in the batch before any split.

    Shape: `tokens`, `mask`, `weight`, `advantages`, `rollout_logprobs`, `versions` are [T];
    `lengths`, `temperature`, `index` are [N].
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]
    weight: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    temperature: NDArray[np.float32]
    index: NDArray[np.int32]
    denominator: float

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def select(self, indices: list[int] | NDArray[np.intp]) -> Batch:
        """Return the sequences `indices`, in that order, with the same denominator."""
        rows = np.asarray(indices, dtype=np.int64)
        flat = entry_indices(self.lengths, rows)
        return Batch(
            tokens=self.tokens[flat],
            lengths=self.lengths[rows],
            mask=self.mask[flat],
            weight=self.weight[flat],
            advantages=self.advantages[flat],
            rollout_logprobs=self.rollout_logprobs[flat],
            versions=self.versions[flat],
            temperature=self.temperature[rows],
            index=self.index[rows],
            denominator=self.denominator,
        )

    def shard(self, num_shards: int) -> list[Batch]:
        """Split into `num_shards` batches of nearly equal token count; some may be empty."""
        parts = balanced_partition(self.lengths.tolist(), num_shards)
        return [self.select(part) for part in parts]
