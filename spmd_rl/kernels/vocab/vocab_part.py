"""VocabPart: the entries of the vocabulary that a rank has, and what it gives of each row."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.kernels.linear.shard_exchange import ShardExchange
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, shard_size

# Words of 4 bytes that a rank gives of a row: its greatest logit / T; the best entry's number in
# the draw and logit / T, all fp32; its id.
ENTRY_WORDS = 4
MAXIMUM, BEST, CHOSEN, ID = range(ENTRY_WORDS)


@dataclass(frozen=True)
class VocabPart:
    """Part `index` of `count` of a vocabulary of `size` entries; the others are behind `exchange`.

    Each part has entries.
    """

    index: int
    count: int
    size: int
    exchange: ShardExchange

    @property
    def num_shards(self) -> int:
        return NUM_VOCAB_SHARDS // self.count

    @property
    def first(self) -> int:
        """The id of the first entry."""
        return self.index * self.num_shards * shard_size(self.size)
