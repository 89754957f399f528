"""How far the ways that races choose are from the fastest: products of Qwen3 that may go to cuBLAS.

When a shape first comes, a process races the ways that have the contract's bits (`linear_library.fastest`). Here it is
raced as several processes would, then all of its ways take turns for longer, the weights of decoding cold in L2. A row
is the slowest way that was chosen beside the fastest of all.

    python -m benchmarks.kernels.library_choice [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from benchmarks.kernels.decode_gemm import BAR, LOGIT_ROWS, PACK_ROUNDS, PACK_ROWS, cold_weights, shapes
from benchmarks.kernels.timing import ROUNDS, in_turns
from benchmarks.record import compared, finish, gpu
from benchmarks.table import Row
from spmd_rl.kernels.cublaslt import Shape, proposed
from spmd_rl.kernels.linear_library import fastest, proves_equal
from spmd_rl.kernels.linear_plan import WHOLE, ours_into

RACES = 4
CHUNKS = (512, 2048, PACK_ROWS)


def cases() -> Iterator[tuple[str, Shape]]:
    """Every product and number of rows that may go to cuBLAS, once where two have one shape; the head has no packs."""
    named = {shape: name for name, shape in reversed(shapes().items())}
    for (n, k, out_dtype), name in reversed(named.items()):
        chunks = (LOGIT_ROWS,) if name.endswith("lm_head") else CHUNKS
        for rows in (*(rows for rows, least in WHOLE.items() if n > least), *chunks):
            yield f"{name} {n}x{k}, {rows} rows", Shape(n, k, rows, False, out_dtype, torch.device("cuda"))


def measure(what: str, shape: Shape) -> Row:
    ways = [ours_into, *(way for way in proposed(shape) if way.splits <= 1 and proves_equal(way, shape))]
    chosen = {ways.index(fastest(ways, shape)) for _ in range(RACES)}
    decoding = shape.rows in WHOLE
    weights = cold_weights(shape.n, shape.k) if decoding else cold_weights(shape.n, shape.k)[:1]
    x = torch.randn(shape.rows, shape.k, device="cuda").bfloat16()
    out = x.new_empty(shape.rows, shape.n, dtype=shape.out_dtype)
    ops = [lambda weight, way=way: way(out, x, weight, None) for way in ways]
    times = in_turns(ops, weights, ROUNDS if decoding else PACK_ROUNDS)
    slowest = max(times[index] for index in chosen)
    said = f"{what}: the slowest of {len(chosen)} of {len(ways)} ways that {RACES} races chose"
    return compared(said, slowest, "us", peer="the fastest", peer_value=min(times), at_most=BAR)


def main() -> int:
    rows = [measure(what, shape) for what, shape in cases()]
    print(f"{sum(row.holds is True for row in rows)} of {len(rows)} bars hold")
    return finish(__file__, ("torch", "triton"), rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
