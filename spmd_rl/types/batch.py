"""What the trainer learns from: sequences laid end to end. numpy only.

Shape letters used here and in docstrings elsewhere: N sequences of a batch, T tokens of all of
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import places
from spmd_rl.types.partition import balanced


@dataclass(frozen=True)
class Batch:
    """Sequences ready to train on, laid end to end.

    Shape: `tokens`, `mask`, `weight`, `advantages`, `roll_logprobs`, `versions` are [T]; `lengths`,
    `temperature`, `index` are [N]. Entry t of the per-token arrays speaks of token t (predicted
    from the tokens before it in its sequence); the first token of a sequence is never in the mask.
    `weight` and `denominator`: the loss is sum(weight * per-token loss) / denominator. Both are
    fixed for the whole batch before it is split over ranks and micro-batches, so that the loss does
    not depend on either. `versions`: the weights that made each token, -1 where no engine did.
    `index`: the sequence's place in the batch before any split.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    mask: NDArray[np.bool_]
    weight: NDArray[np.float32]
    advantages: NDArray[np.float32]
    roll_logprobs: NDArray[np.float32]
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

    def take(self, indices: list[int] | NDArray[np.intp]) -> Batch:
        """The sequences `indices`, in that order, with the same denominator."""
        rows = np.asarray(indices, dtype=np.int64)
        flat = places(self.lengths, rows)
        return Batch(
            tokens=self.tokens[flat],
            lengths=self.lengths[rows],
            mask=self.mask[flat],
            weight=self.weight[flat],
            advantages=self.advantages[flat],
            roll_logprobs=self.roll_logprobs[flat],
            versions=self.versions[flat],
            temperature=self.temperature[rows],
            index=self.index[rows],
            denominator=self.denominator,
        )

    def shard(self, num_shards: int) -> list[Batch]:
        """The batch in `num_shards` parts of nearly equal token count; a part may have no sequence."""
        return [self.take(part) for part in balanced(self.lengths.tolist(), num_shards)]
