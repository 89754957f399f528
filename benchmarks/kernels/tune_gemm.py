"""Time every candidate tile and ring on every decode shape, to find faster ones than tiles.py's.

    python -m benchmarks.kernels.tune_gemm

Only speed depends on the outcome: all give the same bits (test_rows.py and test_rings.py under
tests/gpu/kernels).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from benchmarks.kernels.decode_gemm import cold_weights, floor_us, shapes
from benchmarks.kernels.timing import microseconds
from spmd_rl.kernels.linear.cute import shared_matmul_into
from spmd_rl.kernels.linear.gluon import ring_matmul_into
from spmd_rl.kernels.linear.tiles import (
    REFERENCE,
    Ring,
    Share,
    Tile,
    choose_ring,
    choose_share,
    choose_tile,
)
from spmd_rl.kernels.linear.triton_gemm import matmul_into

CLEARLY = 1.03
CANDIDATES = {
    16: [
        *(
            (16, n, k, 4, stages, True)
            for n, k, stages in ((64, 256, 5), (64, 128, 5), (64, 128, 8), (64, 256, 3))
        ),
        *(
            (16, n, k, 4, stages, True)
            for n, k, stages in ((128, 128, 4), (128, 128, 6), (128, 64, 8), (256, 64, 5))
        ),
        *(
            (16, n, k, 4, stages)
            for n, k, stages in ((16, 512, 4), (16, 256, 4), (16, 256, 8), (32, 256, 4))
        ),
        *(
            (16, n, k, 4, stages)
            for n, k, stages in ((32, 256, 6), (32, 512, 3), (64, 256, 5), (128, 128, 4))
        ),
    ],
    32: [
        *(
            (32, n, k, 4, stages, True)
            for n, k, stages in ((64, 128, 6), (64, 128, 8), (64, 256, 4), (128, 128, 4))
        ),
        *((32, n, k, 4, stages, True) for n, k, stages in ((128, 64, 8), (256, 64, 5))),
        *(
            (32, n, k, 4, stages)
            for n, k, stages in ((16, 256, 5), (32, 256, 5), (32, 128, 8), (64, 128, 6))
        ),
        *((16, n, k, 4, stages, True) for n, k, stages in ((64, 256, 5), (64, 128, 8))),
    ],
    64: [
        *(
            (64, n, k, 4, stages)
            for n, k, stages in ((16, 256, 4), (32, 128, 5), (32, 256, 4), (64, 128, 6))
        ),
        *((64, n, k, 4, stages) for n, k, stages in ((64, 64, 8), (128, 64, 8), (128, 128, 4))),
        *(
            (64, n, k, 4, stages, True)
            for n, k, stages in ((64, 128, 6), (128, 64, 8), (128, 128, 4))
        ),
        *((64, 256, 64, 8, 4, swap) for swap in (False, True)),
        *(
            (32, n, k, 4, stages, True)
            for n, k, stages in ((64, 128, 6), (128, 128, 4), (64, 128, 8))
        ),
    ],
    128: [
        *(
            (64, n, k, 4, stages)
            for n, k, stages in (
                (32, 128, 6),
                (32, 128, 8),
                (64, 128, 5),
                (64, 128, 6),
                (128, 64, 6),
            )
        ),
        *(
            (64, n, k, 4, stages, True)
            for n, k, stages in ((64, 128, 5), (128, 64, 6), (128, 128, 4))
        ),
        *(
            (128, n, k, 4, stages, swap)
            for n, k, stages in ((64, 128, 4), (128, 64, 5))
            for swap in (False, True)
        ),
        *((128, n, k, 4, stages) for n, k, stages in ((32, 128, 5), (64, 64, 8))),
        *(
            (128, n, k, 8, stages, True)
            for n, k, stages in ((64, 128, 4), (128, 64, 5), (256, 64, 4))
        ),
        (128, 256, 64, 8, 4),
    ],
    256: [
        *(
            (64, n, k, 4, stages)
            for n, k, stages in (
                (64, 128, 5),
                (64, 128, 6),
                (128, 64, 6),
                (128, 128, 4),
                (256, 64, 4),
            )
        ),
        *(
            (64, n, k, 4, stages, True)
            for n, k, stages in ((64, 128, 5), (128, 64, 6), (128, 128, 4))
        ),
        *(
            (128, n, k, 4, stages, swap)
            for n, k, stages in ((64, 128, 4), (128, 64, 5))
            for swap in (False, True)
        ),
        *(
            (128, n, k, 8, stages, swap)
            for n, k, stages in ((128, 64, 5), (256, 64, 4))
            for swap in (False, True)
        ),
        *((256, n, k, 8, stages) for n, k, stages in ((64, 64, 5), (128, 64, 4))),
    ],
}
# The same with rings, whose stages are as many as fit: rows of x, rows and steps of the weight,
# stages, warps.
RINGS = {
    8: [(8, 32, 512, 5), (8, 64, 128, 8), (8, 64, 256, 3), (8, 64, 256, 6), (8, 64, 512, 3)],
    16: [
        *((16, n, k, stages) for n, k, stages in ((16, 256, 8), (32, 256, 9), (32, 512, 4))),
        *((16, 64, k, stages) for k, stages in ((128, 5), (128, 8), (256, 5))),
    ],
    32: [(16, 32, 512, 4), (32, 32, 256, 6), (32, 64, 128, 4), (32, 64, 128, 9), (32, 64, 256, 4)],
    64: [
        (32, 32, 256, 6),
        (32, 64, 256, 4),
        (64, 64, 128, 3),
        (64, 64, 128, 6),
        (64, 64, 256, 3),
        (64, 128, 128, 4, 8),
    ],
    128: [(32, 64, 256, 4), (64, 64, 128, 6), (128, 64, 128, 4), (128, 128, 64, 6, 8)],
    256: [(64, 64, 128, 6), (128, 64, 128, 4), (128, 128, 64, 6, 8)],
}


def compile_all(dtype: torch.dtype) -> None:
    """Compile all tiles on all cores, as a table is only good if its tiles give the same bits."""
    weight = torch.randn(4096, 4096, device="cuda").bfloat16()
    x = torch.randn(256, 4096, device="cuda").bfloat16()

    def product(one: Tile | Ring) -> Tensor:
        out = torch.empty(256, 4096, device="cuda", dtype=dtype)
        multiply(out, x, weight, one)
        return out

    tiles: list[Tile | Ring] = [Tile(*one) for some in CANDIDATES.values() for one in some]
    tiles += [ring for some in RINGS.values() for one in some for ring in early_and_late(one)]
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(product, tiles))
    reference = product(REFERENCE)
    assert all(torch.equal(result, reference) for result in results)


def early_and_late(ring: tuple[int, ...]) -> list[Ring]:
    return [Ring(*ring), Ring(*ring)._replace(late=True)]


def multiply(out: Tensor, x: Tensor, weight: Tensor, one: Tile | Ring | Share) -> None:
    if isinstance(one, Share):
        shared_matmul_into(out, x, weight, None, one)
    elif isinstance(one, Ring):
        ring_matmul_into(out, x, weight, None, one)
    else:
        matmul_into(out, x, weight, None, one)


def time_tiles(
    m: int, n: int, k: int, dtype: torch.dtype, weights: list[Tensor]
) -> dict[Tile | Ring | Share, float]:
    x, out = (
        torch.randn(m, k, device="cuda").bfloat16(),
        torch.empty(m, n, device="cuda", dtype=dtype),
    )
    tiles = {chosen(m, n, k, dtype), *(Tile(*one) for one in CANDIDATES[max(m, 16)])}
    tiles |= {ring for one in RINGS[m] for ring in early_and_late(one)}
    return {
        tile: microseconds(lambda w, tile=tile: multiply(out, x, w, tile), weights)
        for tile in tiles
    }


def chosen(m: int, n: int, k: int, dtype: torch.dtype) -> Tile | Ring | Share:
    share = choose_share(m, n, k) if dtype == torch.bfloat16 else None
    return share or choose_ring(m, n, k) or choose_tile(m, n)


def main() -> None:
    compile_all(torch.bfloat16)
    compile_all(torch.float32)
    for n, k, dtype in dict.fromkeys(shapes().values()):
        weights = cold_weights(n, k)
        for m in RINGS:
            times, ours = time_tiles(m, n, k, dtype, weights), chosen(m, n, k, dtype)
            best = min(times, key=times.__getitem__)
            better = (
                f"; {best} takes {times[best]:.1f}" if times[ours] > CLEARLY * times[best] else ""
            )
            print(
                f"{n}x{k} M={m}: {times[ours]:.1f} us, "
                f"floor {floor_us(m, n, k, dtype):.1f}{better}",
                flush=True,
            )


if __name__ == "__main__":
    main()
