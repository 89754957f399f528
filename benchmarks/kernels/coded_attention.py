"""Decode attention over pages of e4m3 codes, beside pages of the numbers that they stand for.

The two take turns, and their bits are compared (docs/low-precision.md). Keys and values have 8
heads of 128. Several caches are read in turn, so that nothing is left in L2. A bar is set for 256
sequences of 4,096 tokens: there codes take at most 0.8x of bfloat16's time.

    python -m benchmarks.kernels.coded_attention [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.attention_decode import ADVISED_SPLIT, Case, Sequences
from benchmarks.kernels.timing import in_turns
from benchmarks.record import compared, counted, finish, gpu, gpu_machine, measured
from benchmarks.table import Row
from spmd_rl.kernels.low_precision.kv_codes import decode_pages

OF_BAR = Case(32, 256, 4096)
CASES = [
    OF_BAR,
    *(Case(heads, 64, 1024) for heads in (16, 32)),
    *(Case(32, 1, 32768, split) for split in (0, ADVISED_SPLIT)),
]
MOST_TIME = 1 / 1.25  # of codes, in times of bfloat16
EXPONENTS = 0, 0
SMALL = 0xBF  # the bits of codes for numbers below 2


def measure(case: Case) -> Iterator[Row]:
    of = Sequences(case)
    every, pairs = torch.arange(of.shape[1], device="cuda"), []
    for _ in range(of.num_caches):
        codes = torch.randint(0, 256, of.shape, device="cuda", dtype=torch.uint8) & SMALL
        pairs.append((codes, decode_pages(codes, every, EXPONENTS[0], torch.bfloat16)))
    over_codes, over_numbers = of.attend(EXPONENTS), of.attend()
    equal = [torch.equal(over_codes(codes), over_numbers(numbers)) for codes, numbers in pairs]
    ops = [lambda pair: over_codes(pair[0]), lambda pair: over_numbers(pair[1])]
    coded, bf16 = in_turns(ops, pairs)
    bar = MOST_TIME if case == OF_BAR else None
    yield compared(f"{of.what}: time", coded, "us", peer="bf16", peer_value=bf16, at_most=bar)
    yield measured(f"{of.what}: codes read", of.num_bytes / 2 / coded / 1e6, "TB/s")
    yield measured(f"{of.what}: bf16 read", of.num_bytes / bf16 / 1e6, "TB/s")
    yield counted(f"{of.what}: equal bits", equal)


def main() -> int:
    rows: list[Row] = []
    for case in CASES:
        rows += measure(case)
        torch.cuda.empty_cache()
    packages = ("torch", "flash-attn-4")
    save, machine = "--save" in sys.argv, gpu_machine()
    return finish(__file__, packages, rows, save=save, machine=machine, **gpu())


if __name__ == "__main__":
    sys.exit(main())
