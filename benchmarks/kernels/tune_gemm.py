"""Find the fastest tile of every decode shape and print the table of spmd_rl/kernels/linear_tiles.py.

    python benchmarks/kernels/tune_gemm.py > table.txt

Only speed depends on the outcome: every tile gives the same bits (tests/gpu/kernels/test_rows.py).
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from decode_gemm import cold_weights, floor_us, microseconds, shapes

from spmd_rl.kernels.linear_tiles import ROW_BUCKETS, Tile
from spmd_rl.kernels.linear_triton import matmul_into

NARROW = [
    Tile(16, 16, 256, 4, 4),
    Tile(16, 16, 512, 4, 4),
    Tile(16, 32, 128, 4, 6),
    Tile(16, 32, 256, 4, 4),
    Tile(16, 32, 256, 2, 4),
    Tile(16, 32, 512, 4, 3),
    Tile(16, 64, 128, 4, 5),
    Tile(16, 64, 256, 4, 3),
    Tile(16, 64, 256, 8, 4),
    Tile(16, 128, 128, 4, 4),
    Tile(16, 128, 128, 8, 5),
    Tile(16, 128, 64, 4, 6),
]
MIDDLE = [
    Tile(32, 16, 256, 4, 4),
    Tile(32, 32, 256, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(32, 64, 256, 4, 3),
    Tile(32, 128, 128, 4, 4),
    Tile(64, 16, 256, 4, 4),
    Tile(64, 32, 128, 4, 5),
    Tile(64, 32, 256, 4, 3),
    Tile(64, 64, 64, 4, 6),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 5),
    Tile(64, 128, 128, 4, 3),
    Tile(64, 128, 128, 8, 3),
    Tile(64, 256, 64, 8, 4),
]
WIDE = [
    Tile(128, 16, 256, 4, 3),
    Tile(128, 32, 128, 4, 4),
    Tile(128, 64, 64, 4, 5),
    Tile(128, 64, 128, 4, 4),
    Tile(128, 64, 128, 8, 4),
    Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 256, 64, 8, 3),
    Tile(256, 64, 64, 8, 4),
    Tile(256, 128, 64, 8, 4),
]
CANDIDATES = {
    16: NARROW,
    32: NARROW[2:8] + MIDDLE[:5],
    64: NARROW[3:4] + MIDDLE,
    128: MIDDLE[1:] + WIDE[:8],
    256: MIDDLE[6:] + WIDE,
}


def compile_all() -> None:
    """Compile every tile at once, on all cores."""
    x = torch.randn(16, 4096, device="cuda").bfloat16()

    def build(tile: Tile, dtype: torch.dtype) -> None:
        matmul_into(
            torch.empty(16, 4096, device="cuda", dtype=dtype), x, x.expand(256, -1, -1).reshape(4096, -1), None, tile
        )

    with ThreadPoolExecutor(16) as pool:
        jobs = [
            pool.submit(build, tile, dtype)
            for tile in NARROW + MIDDLE + WIDE
            for dtype in (torch.bfloat16, torch.float32)
        ]
        for job in jobs:
            job.result()


def best_tile(m: int, n: int, k: int, dtype: torch.dtype, weights: list[torch.Tensor]) -> tuple[Tile, float]:
    x, out = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, device="cuda", dtype=dtype)
    times = {
        tile: microseconds(lambda w, tile=tile: matmul_into(out, x, w, None, tile), weights)
        for tile in CANDIDATES[m]
        if k % tile.k == 0
    }
    tile = min(times, key=times.__getitem__)
    return tile, times[tile]


def main() -> None:
    compile_all()
    done = set()
    for name, (n, k, dtype) in shapes().items():
        if (n, k) in done:
            continue
        done.add((n, k))
        weights = cold_weights(n, k)
        found = [best_tile(m, n, k, dtype, weights) for m in ROW_BUCKETS]
        print(f"    ({n}, {k}): ({', '.join(str(tuple(tile)) for tile, _ in found)}),", flush=True)
        report = "  ".join(
            f"{m}: {us:.1f}/{floor_us(m, n, k):.1f}" for m, (_, us) in zip(ROW_BUCKETS, found, strict=True)
        )
        print(f"{name} {n}x{k}  {report}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
