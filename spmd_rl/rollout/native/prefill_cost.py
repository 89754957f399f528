"""Estimated time of prefill steps on a GPU, from the shape of the model.

A step takes the time of its linear layers, which the number of tokens decides, and of attention,
which the number of keys before them decides too. A multiprocessor attends from a tile of queries to
all their keys. So a step takes no less than one tile, and fewer tokens than fill the GPU save none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from spmd_rl.model.spec import ModelSpec

QUERY_TILE = 128  # tokens of one head
# Speeds in bfloat16 of one multiprocessor of an H100 or H200. That of linear layers is an estimate
# with all that is done to a token but attention; results/h100/long_prompt.json compares it.
LINEAR_FLOPS_PER_S = 3.0e12
# FlashAttention-4 with heads of 128, behind a prefix (results/h200/attention_prefill.json)
ATTENTION_FLOPS_PER_S = 4.2e12


class StepWork(NamedTuple):
    """Work of a step in seconds of the whole GPU, and the seconds that one tile attends for."""

    linear_s: float = 0.0
    attention_s: float = 0.0
    tile_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.linear_s + max(self.attention_s, self.tile_s)


@dataclass(frozen=True)
class PrefillCost:
    """What prefill costs on a device.

    `token_s` is the time of a token without attention. `key_s` is the time of a token for each key
    that it attends to, if the GPU is full. A chunk attends in tiles of `tile_tokens`. `wave_tokens`
    fill the GPU: all multiprocessors have a tile.
    """

    token_s: float = 0.0
    key_s: float = 0.0
    tile_tokens: int = 1
    wave_tokens: int = 1

    @staticmethod
    def of_model(spec: ModelSpec, num_processors: int) -> PrefillCost:
        """Return the costs of a model on a GPU with so many multiprocessors."""
        blocks = [block.cost() for block in spec.blocks]
        multiplied = sum(block.multiplied for block in blocks)
        flops_per_key = sum(block.flops_per_key for block in blocks)
        query_heads = max(block.query_heads for block in blocks)
        return PrefillCost(
            token_s=2 * multiplied / (LINEAR_FLOPS_PER_S * num_processors),
            key_s=flops_per_key / (ATTENTION_FLOPS_PER_S * num_processors),
            tile_tokens=QUERY_TILE,
            wave_tokens=max(1, num_processors // max(query_heads, 1)) * QUERY_TILE,
        )

    def add(self, work: StepWork, start: int, num_tokens: int) -> StepWork:
        """Return `work` with a chunk of `num_tokens` tokens behind `start` others."""
        end = start + num_tokens
        in_tiles = -(-num_tokens // self.tile_tokens) * self.tile_tokens
        return StepWork(
            work.linear_s + num_tokens * self.token_s,
            work.attention_s + in_tiles * (start + end) / 2 * self.key_s,
            max(work.tile_s, self.wave_tokens * end * self.key_s),
        )
