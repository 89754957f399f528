"""Products of decoding with weights in few bits, beside our own with weights in bfloat16.

Each number is the median over replays of a graph, as in decode_gemm.py. The two take turns, and the
weights are cold in L2. The bits of both are compared first, with the decoded weight.

    python -m benchmarks.kernels.coded_gemm [--weights e4m3] [--tiles] [--save]

With --tiles, all tiles that could serve are timed instead, and the fastest is printed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.decode_gemm import ROWS, cold_weights, shapes
from benchmarks.kernels.timing import in_turns
from benchmarks.record import compared, counted, finish, gpu, gpu_machine
from benchmarks.table import Row
from spmd_rl.kernels import linear
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.kernels.low_precision.block_codes import BlockCodes
from spmd_rl.kernels.low_precision.coded_gemm import WarpTile, warp_matmul_into
from spmd_rl.kernels.low_precision.products import coded_linear
from spmd_rl.model.formats import FORMATS
from spmd_rl.types.code_format import CodeFormat

FUSED = ("qkv", "o", "gate_up", "down")  # products of an engine
MULTIPROCESSORS, REGISTERS = 132, 1 << 16
OTHER_REGISTERS = 100  # of a thread, besides its sums
MOST_BLOCKS = 6 * MULTIPROCESSORS


def products() -> dict[str, tuple[int, int]]:
    return {
        name: (n, k) for name, (n, k, _) in shapes().items() if name.rpartition(" ")[2] in FUSED
    }


def cold_codes(n: int, k: int, own: CodeFormat) -> list[BlockCodes]:
    """Return as many bytes of weights as of bf16."""
    times = 16 // own.bits
    return [
        block_codes.quantised(own, weight) for _ in range(times) for weight in cold_weights(n, k)
    ]


def differing(x: Tensor, weight: BlockCodes) -> int:
    expected = linear(x, weight.decoded(torch.bfloat16))
    return int((coded_linear(x, weight) != expected).sum())


@torch.no_grad()
def measure(name: str, n: int, k: int, own: CodeFormat) -> list[Row]:
    plain, coded = cold_weights(n, k), cold_codes(n, k, own)
    # inputs of both ops have one number, so that they take turns: pairs of weights
    pairs = list(zip(itertools.cycle(plain), coded, strict=False))
    found = []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").bfloat16()
        ours, bf16 = in_turns(
            [lambda pair, x=x: coded_linear(x, pair[1]), lambda pair, x=x: linear(x, pair[0])],
            pairs,
            rounds=4,
        )
        what = f"{own.name}: {name} {n}x{k}, {m} rows"
        found.append(compared(what, ours, "us", peer="bf16", peer_value=bf16))
        print(f"{what}: {ours:.2f} us, bf16 {bf16:.2f} us, {bf16 / ours:.2f}x", flush=True)
        found.append(counted(f"{what}, equal bits", [differing(x, coded[0]) == 0]))
    return found


def possible_tiles(m: int, n: int, bits: int) -> list[WarpTile]:
    """Return tiles for m rows of x and a weight of n rows, each with three stages or more."""
    found = _grouped_tiles(m, n) if m > 16 else _warp_tiles(m, n)
    return [tile for tile in found if tile.stages(bits) >= 3 and _units_fit(tile, bits)]


def _warp_tiles(m: int, n: int) -> Iterator[WarpTile]:
    cols = 8 if m <= 8 else 16
    for rows, of_warp, step in itertools.product(
        (16, 32, 48, 64, 96, 192), (8, 16, 24), (128, 256, 512)
    ):
        blocks = -(-n // rows)
        if rows % of_warp or not 100 <= blocks <= MOST_BLOCKS or not 2 <= rows // of_warp <= 16:
            continue
        for shared in _sharing(blocks):
            yield WarpTile(rows, cols, rows // of_warp, step, shared)


def _grouped_tiles(m: int, n: int) -> Iterator[WarpTile]:
    for groups, cols, step in itertools.product((1, 2, 3), (32, 64, 128, 256), (128, 256)):
        blocks = -(-n // (64 * groups)) * -(-m // cols)
        if cols > max(m, 32) or not 60 <= blocks <= MOST_BLOCKS:
            continue
        for shared in _sharing(blocks):
            if shared * groups * 128 * (cols // 2 + OTHER_REGISTERS) <= REGISTERS:
                yield WarpTile(64 * groups, cols, 4 * groups, step, shared, grouped=True)


def _sharing(blocks: int) -> range:
    """Return how many of so many blocks may share a multiprocessor."""
    return range(1, min(3, -(-blocks // MULTIPROCESSORS)) + 1)


def _units_fit(tile: WarpTile, bits: int) -> bool:
    """Return whether each thread takes the same units of 16 bytes of each row."""
    return all(tile.threads % (size // 16) == 0 for size in (2 * tile.step, tile.step * bits // 8))


@torch.no_grad()
def tune(name: str, n: int, k: int, own: CodeFormat) -> None:
    """Print the fastest tiles for a product, beside bf16."""
    plain, coded = cold_weights(n, k), cold_codes(n, k, own)
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").bfloat16()
        out = x.new_empty(m, n)
        tiles = possible_tiles(m, n, own.bits)
        ways = [
            lambda weight, tile=tile: warp_matmul_into(out, x, weight, None, tile)  # noqa: B023
            for tile in tiles
        ]
        times = in_turns(ways, coded, rounds=2, turns=7)
        (bf16,) = in_turns([lambda weight: linear(x, weight)], plain, rounds=4)  # noqa: B023
        best = sorted(zip(times, tiles, strict=True))[:4]
        listed = "; ".join(f"{us:.2f} {tuple(tile)}" for us, tile in best)
        print(f"{name} {n}x{k}, {m} rows: bf16 {bf16:.2f} us; {listed}", flush=True)


def main() -> int:
    options = options_of(__doc__)
    own = FORMATS[options.weights]
    if options.tiles:
        for name, shape in products().items():
            tune(name, *shape, own)
        return 0
    rows = [row for name, shape in products().items() for row in measure(name, *shape, own)]
    packages = ("torch", "triton")
    return finish(__file__, packages, rows, save=options.save, machine=gpu_machine(), **gpu())


def options_of(description: str | None) -> argparse.Namespace:
    """Return the options of a benchmark of codes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", choices=FORMATS, default="e4m3")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
