"""Routing: which shard of a role serves a request, by load and by the prefixes that it has cached.

Source: the cache-aware policy of SGLang's router, which keeps an approximate tree of each worker's
prefixes; here a table of hashed blocks stands in for the tree.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64  # prefixes are compared in blocks of this size
MAX_BLOCKS = 1 << 16  # the blocks that are remembered; the least recently used are forgotten


class Route(NamedTuple):
    """What the choice of a shard depends on.

    Requests of one `key`, such as the samples of one prompt, are kept together while one of them is
    unanswered. `tokens` is the prompt, and `cost` the tokens that the request computes at most.
    """

    key: int
    tokens: NDArray[np.int32]
    cost: int


class ShardBalancer:
    """Chooses a shard for each request of one role. Any thread may use it.

    A request goes to the shard whose open requests cost least, where tokens of the request's own
    prefix that the shard has probably cached count as saved.
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards
        self._cost = [0] * num_shards
        self._by_key: dict[int, list[int]] = {}  # key to [shard, number of open requests]
        self._blocks: OrderedDict[int, int] = OrderedDict()  # chained hash to the shards' bits
        self._lock = threading.Lock()

    def acquire(self, route: Route) -> int:
        """Return the shard for a request, and count the request there until `release`."""
        if self._num_shards == 1:
            return 0
        with self._lock:
            entry = self._by_key.get(route.key)
            blocks = _block_hashes(route.tokens)
            shard = entry[0] if entry else self._least_cost(self._cached_tokens(blocks))
            if entry:
                entry[1] += 1
            else:
                self._by_key[route.key] = [shard, 1]
            self._cost[shard] += route.cost
            self._remember(blocks, shard)
            return shard

    def release(self, route: Route, shard: int) -> None:
        """Note that a request has ended on its shard."""
        if self._num_shards == 1:
            return
        with self._lock:
            self._cost[shard] -= route.cost
            entry = self._by_key[route.key]
            entry[1] -= 1
            if not entry[1]:
                del self._by_key[route.key]

    def _least_cost(self, cached: list[int]) -> int:
        return min(range(self._num_shards), key=lambda shard: self._cost[shard] - cached[shard])

    def _cached_tokens(self, blocks: list[int]) -> list[int]:
        """Return how many leading tokens each shard has seen before."""
        cached = [0] * self._num_shards
        shards = (1 << self._num_shards) - 1
        for number, block in enumerate(blocks, start=1):
            shards &= self._blocks.get(block, 0)
            if not shards:
                break
            for shard in range(self._num_shards):
                if shards >> shard & 1:
                    cached[shard] = number * BLOCK_TOKENS
        return cached

    def _remember(self, blocks: list[int], shard: int) -> None:
        for block in blocks:
            self._blocks[block] = self._blocks.pop(block, 0) | 1 << shard
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)


def _block_hashes(tokens: NDArray[np.int32]) -> list[int]:
    """Return a hash for each whole block, which depends on all tokens up to its end."""
    hashes, last = [], 0
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        last = hash((last, tokens[start : start + BLOCK_TOKENS].tobytes()))
        hashes.append(last)
    return hashes
