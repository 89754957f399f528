"""Decode attention over pages, one new token of each sequence, in shares of a copy's bandwidth.

Keys and values have 8 heads of 128, for 16 (Qwen3-0.6B) or 32 (4B and 8B) query heads. Pages have
128 tokens and lie in random order. Each number is the median over replays of a graph that runs the
kernel once for each of several caches, so that nothing is left in L2. Bytes are the keys and values
read; the copy counts what it reads and writes. With splits, the time includes merging. A bar is set
for the size of docs/numerics.md.

    python -m benchmarks.kernels.attention_decode [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.timing import copy_bytes_per_s, microseconds
from benchmarks.record import finish, gpu, measured
from benchmarks.shapes import HEAD_DIM
from benchmarks.table import Row
from spmd_rl.kernels.attention.flash import DecodeFlash
from spmd_rl.kernels.attention.flash_split_kv import DecodeSplits
from spmd_rl.kernels.low_precision.kv_codes import KvExponents

NUM_KV_HEADS, PAGE_SIZE = 8, 128
ADVISED_SPLIT = 4096  # docs/numerics.md


class Case(NamedTuple):
    num_heads: int
    batch: int
    context: int
    split: int = 0
    least_share: float | None = None  # of copy bandwidth
    least_speed: float | None = None  # TB/s


CASES = [
    *(Case(16, batch, 500) for batch in (64, 256)),
    *(Case(32, batch, 500) for batch in (1, 64, 256)),
    Case(32, 64, 2300),
    *(Case(32, 64, context, least_share=0.9) for context in (2048, 8192)),
    *(
        Case(32, batch, 32768, split, least_speed=3 * before if split == ADVISED_SPLIT else None)
        for batch, before in ((1, 0.36), (4, 1.42))
        for split in (1024, 2048, 4096, 8192)
    ),
    *(Case(32, batch, 32768) for batch in (1, 4)),
]
COLD_BYTES = 1 << 30
CALLS = 40  # in a graph, so that its launch is a small part


class Sequences:
    """The queries and pages of a case, and attention to caches [2, pages, page, heads, D]."""

    def __init__(self, case: Case) -> None:
        batch, self.split = case.batch, case.split
        pages = -(-case.context // PAGE_SIZE)
        self.shape = 2, batch * pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM
        self.num_bytes = 4 * batch * case.context * NUM_KV_HEADS * HEAD_DIM
        self.num_caches = -(-COLD_BYTES // self.num_bytes) + 1
        table = torch.randperm(batch * pages, device="cuda", dtype=torch.int32).view(batch, pages)
        num_keys = torch.full((batch,), case.context, dtype=torch.int32, device="cuda")
        self.given = table, num_keys, torch.zeros(1, dtype=torch.int32, device="cuda")
        self.q = torch.randn(batch, case.num_heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.what = f"{case.num_heads} heads, batch {batch}, context {case.context}" + (
            f", splits of {self.split}" if self.split else ""
        )

    def attend(self, exponents: KvExponents | None = None) -> Callable[[Tensor], Tensor]:
        kernel: DecodeFlash | DecodeSplits = DecodeFlash(*self.given, exponents)
        if self.split:
            kernel = DecodeSplits(*self.given, PAGE_SIZE, self.split, exponents)
        return lambda cache: kernel(self.q, cache[0], cache[1])


def measure(case: Case, copy: float) -> Iterator[Row]:
    of = Sequences(case)
    caches = [
        torch.randn(of.shape, device="cuda", dtype=torch.bfloat16) for _ in range(of.num_caches)
    ]
    spent = microseconds(of.attend(), caches * -(-CALLS // len(caches)))
    speed, what = of.num_bytes / spent * 1e6, of.what
    yield measured(f"{what}: time", spent, "us")
    yield measured(f"{what}: read", speed / 1e12, "TB/s", at_least=case.least_speed)
    yield measured(f"{what}: share of copy bandwidth", speed / copy, "", at_least=case.least_share)


def main() -> int:
    copy = copy_bytes_per_s()
    rows = [measured("copy, read and written", copy / 1e12, "TB/s")]
    for case in CASES:
        rows += measure(case, copy)
        torch.cuda.empty_cache()
    packages = ("torch", "flash-attn-4")
    return finish(__file__, packages, rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
