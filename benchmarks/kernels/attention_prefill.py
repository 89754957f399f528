"""Attention of many new tokens: training packs forward and backward, and chunks of prompts.

There are 32 query heads over 8 of 128, in bf16, and 16 over 4 of 256, which our own kernel attends
to (blocked_triton.py). Packs have 16,384 tokens in sequences of one length. Beside them stands
torch's scaled-dot-product attention for the same sequences as a batch, which promises no bits.
Chunks have 8,192 new tokens behind what their sequences have in the cache; their time includes the
write of keys and values.

Each number is the median of 10 runs of 10 calls between two events. Where the host launches more
slowly than the GPU computes, it is the host's time. Speeds count what a causal mask leaves: 4
floating-point operations for each pair of query and key, head and dimension, and 2.5 times as many
for the backward pass.

    python -m benchmarks.kernels.attention_prefill [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import compared, finish, gpu, measured
from benchmarks.shapes import HEAD_DIM
from benchmarks.table import Row
from spmd_rl.kernels import KvCache, PackedAttention, PagedAttention
from spmd_rl.kernels.runtime.interleaved_timing import seconds
from spmd_rl.model.layers.layer import CacheSpec

PAGE_SIZE = 128
PACK_TOKENS, LENGTHS = 16384, (512, 2048, 16384)
CHUNK_TOKENS = 8192
CHUNKS = ((64, 0), (8, 1024), (4, 6144), (1, 24576))  # sequences, and what each has in the cache
WARM_UP, RUNS, CALLS = 2, 10, 10
DEVICE = torch.device("cuda")


class Heads(NamedTuple):
    query: int
    key: int
    dim: int


FLASH, OURS = Heads(32, 8, HEAD_DIM), Heads(16, 4, 256)


def random(num_tokens: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (heads.query, heads.key, heads.key)
    q, k, v = (
        torch.randn(num_tokens, n, heads.dim, device=DEVICE, dtype=torch.bfloat16) for n in sizes
    )
    return q, k, v


def call_seconds(ops: list[Callable[[], object]]) -> list[float]:
    """Return the median time of a call of each."""

    def often(op: Callable[[], object]) -> Callable[[], None]:
        def calls() -> None:
            for _ in range(CALLS):
                op()

        return calls

    return [one / CALLS for one in seconds([often(op) for op in ops], RUNS, WARM_UP)]


def packs(length: int, heads: Heads) -> Iterator[Row]:
    count = PACK_TOKENS // length
    attend = PackedAttention(np.full(count, length), device=DEVICE)
    ours = [x.requires_grad_() for x in random(PACK_TOKENS, heads)]
    theirs = [
        x.detach().view(count, length, -1, heads.dim).transpose(1, 2).requires_grad_() for x in ours
    ]

    def packed() -> Tensor:
        return attend(0, ours[0], ours[1], ours[2])

    def batched() -> Tensor:
        return F.scaled_dot_product_attention(
            theirs[0], theirs[1], theirs[2], is_causal=True, enable_gqa=True
        )

    def backward(forward: Callable[[], Tensor], leaves: list[Tensor]) -> None:
        out = forward()
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    flops = 4 * heads.query * heads.dim * count * length * (length + 1) / 2
    what = f"{count} sequences of {length}" + ("" if heads == FLASH else f", heads of {heads.dim}")
    with torch.no_grad():
        times = call_seconds([packed, batched])
    yield _speeds(f"{what}, forward", flops, *times)
    times = call_seconds([lambda: backward(packed, ours), lambda: backward(batched, theirs)])
    yield _speeds(f"{what}, forward and backward", 3.5 * flops, *times)


def _speeds(what: str, flops: float, ours: float, theirs: float) -> Row:
    return compared(
        what, flops / ours / 1e12, "TFLOP/s", peer="torch's SDPA", peer_value=flops / theirs / 1e12
    )


@torch.no_grad()
def chunk(count: int, start: int) -> Row:
    length = CHUNK_TOKENS // count
    pages = -(-(start + length) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(count * pages).reshape(count, pages)
    cache = KvCache(
        [CacheSpec(((FLASH.key, FLASH.dim),) * 2, FLASH.query // FLASH.key)],
        num_pages=table.size,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    cache.data.normal_()
    places = start + np.arange(length)
    attend = PagedAttention.chunks(
        cache,
        page_table=table,
        starts=np.full(count, start),
        lengths=np.full(count, length),
        slots=(table[:, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE).ravel(),
    )
    given = random(CHUNK_TOKENS, FLASH)
    flops = 4 * FLASH.query * FLASH.dim * count * length * (start + (length + 1) / 2)
    speed = flops / call_seconds([lambda: attend(0, *given)])[0] / 1e12
    return measured(f"{count} chunks of {length} behind {start}", speed, "TFLOP/s")


def main() -> int:
    rows = [row for length in LENGTHS for row in packs(length, FLASH)]
    rows += [row for length in LENGTHS[:2] for row in packs(length, OURS)]
    rows += [chunk(*case) for case in CHUNKS]
    packages = ("torch", "flash-attn-4")
    return finish(__file__, packages, rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
