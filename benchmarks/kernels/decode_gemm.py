"""GEMMs of Qwen3, for decoding and for packs, against cuBLAS's best with split-K: microseconds.

Ours keeps one ascending chain over K (docs/numerics.md). Each number of a decode GEMM is the median
over replays of a graph, which runs the product for many copies of the weight for about 1 ms, so
that they are cold in L2. Ours and cuBLAS's take turns; ours overlap at their ends, as in the
engine. cuBLAS's best is the fastest, in a shorter run before, of torch.mm and all that cublasLt
proposes, with memory for partial sums and without. It also takes turns with itself, recorded a
second time. The largest difference of these is the error of a number here.

The floor is the longer of two times: to move weight, x and result once, at the speed of a large
copy just before, and to do the arithmetic at the speed of a large product. The floor of the weight
alone stands beside it, without a bar.

Gate and up with SiLU and the product between them (`silu_mul_linear`) are compared with cuBLAS's
fused product and torch's two kernels.

Products of packs have 16,384 rows, those of the head the 2,048 of a chunk of the training loss.
Training computes q, k, v, gate and up separately, and the engine's prompts fuse them. There
cuBLAS's best is what `cublas.fastest` finds among the same algorithms.

    python -m benchmarks.kernels.decode_gemm [--save]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cublas import every_way
from benchmarks.kernels.timing import copy_bytes_per_s, in_turns
from benchmarks.record import compared, counted, finish, gpu, measured
from benchmarks.shapes import HEAD_DIM, MEASURED_FLOPS_PER_S, QWEN3, VOCAB
from benchmarks.table import Row
from spmd_rl.kernels import silu_mul_linear
from spmd_rl.kernels.linear.cublas import fastest
from spmd_rl.kernels.linear.cublaslt import Shape
from spmd_rl.kernels.linear.dispatch import matmul

ROWS = (1, 16, 64, 128, 256)
PACK_ROWS, LOGIT_ROWS = 16384, 2048
PACK_ROUNDS = 8  # these products are long
COLD_BYTES = 256 << 20
MAX_COPIES = 64
TRIAL_ROUNDS, TRIAL_TURNS = 4, 15
BAR = 1.02
FLOOR_BAR = 0.85
FLOOR, WEIGHT_FLOOR, ITSELF = (
    "share of floor",
    "share of the weight's floor",
    "cuBLAS's best beside itself",
)
LARGE_BYTES = 30e6


def shapes() -> dict[str, tuple[int, int, torch.dtype]]:
    """Return name -> (N, K, dtype of the result); q, k, v and gate, up both fused and separate."""
    found = {}
    for model, (hidden, inner, _, heads, kv_heads, _) in QWEN3.items():
        q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
        for name, n, k in (
            ("q", q, hidden),
            ("kv", kv, hidden),
            ("qkv", q + 2 * kv, hidden),
            ("o", hidden, q),
            ("gate", inner, hidden),
            ("gate_up", 2 * inner, hidden),
            ("down", hidden, inner),
        ):
            found[f"Qwen3-{model} {name}"] = (n, k, torch.bfloat16)
        found[f"Qwen3-{model} lm_head"] = (VOCAB, hidden, torch.float32)
    return found


def cold_weights(n: int, k: int) -> list[Tensor]:
    copies = min(MAX_COPIES, max(2, -(-COLD_BYTES // (2 * n * k))))
    return [torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies)]


def floor_us(m: int, n: int, k: int, num_bytes: int, bytes_per_s: float) -> float:
    return 1e6 * max(num_bytes / bytes_per_s, 2 * m * n * k / MEASURED_FLOPS_PER_S)


def cublas_best(
    x: Tensor, weights: list[Tensor], out_dtype: torch.dtype
) -> Callable[[Tensor], object]:
    shape = Shape(*weights[0].shape, len(x), False, out_dtype, x.device)
    out = x.new_empty(shape.rows, shape.n, dtype=out_dtype)
    ways = [lambda w, way=way: way(out, x, w, None) for way in every_way(shape)]
    times = in_turns(ways, weights, TRIAL_ROUNDS, TRIAL_TURNS)
    return ways[times.index(min(times))]


def pack_rows(name: str) -> int:
    """Return the rows that the product of this name has in training."""
    return LOGIT_ROWS if name.endswith("lm_head") else PACK_ROWS


def measure_pack(name: str, n: int, k: int, out_dtype: torch.dtype) -> Row:
    m = pack_rows(name)
    x, weight = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    out, shape = x.new_empty(m, n, dtype=out_dtype), Shape(n, k, m, False, out_dtype, x.device)
    best = fastest(every_way(shape), shape)
    ways = [lambda w: matmul(x, w, None, out_dtype), lambda w: best(out, x, w, None)]
    ours, cublas = in_turns(ways, [weight], PACK_ROUNDS)
    what = f"{name} {n}x{k}, {m} rows"
    return compared(what, ours, "us", peer="cuBLAS's best", peer_value=cublas, at_most=BAR)


def measure(name: str, n: int, k: int, out_dtype: torch.dtype, bytes_per_s: float) -> list[Row]:
    weights, found = cold_weights(n, k), []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").bfloat16()
        best = cublas_best(x, weights, out_dtype)
        ours, cublas, again = in_turns(
            [lambda w, x=x: matmul(x, w, None, out_dtype), best, best], weights
        )
        what = f"{name} {n}x{k}, {m} rows"
        found.append(
            compared(what, ours, "us", peer="cuBLAS's best", peer_value=cublas, at_most=BAR)
        )
        found.append(measured(f"{what}, {ITSELF}", max(cublas, again) / min(cublas, again), ""))
        if m <= 64 and 2 * n * k >= LARGE_BYTES:
            weight, others = 2 * n * k, 2 * m * k + out_dtype.itemsize * m * n
            share, of_weight = (
                floor_us(m, n, k, each, bytes_per_s) / ours for each in (weight + others, weight)
            )
            found.append(measured(f"{what}, {FLOOR}", share, "", at_least=FLOOR_BAR))
            found.append(measured(f"{what}, {WEIGHT_FLOOR}", of_weight, ""))
    return found


@torch.no_grad()
def measure_gated(model: str) -> list[Row]:
    hidden, inner = QWEN3[model][:2]
    weights, found = cold_weights(2 * inner, hidden), []
    for m in ROWS:
        x = torch.randn(m, hidden, device="cuda").bfloat16()

        def spelled(w: Tensor, x: Tensor = x) -> Tensor:
            gate, up = torch.mm(x, w.t()).chunk(2, dim=-1)
            return F.silu(gate) * up

        ours, theirs = in_turns([lambda w, x=x: silu_mul_linear(x, w), spelled], weights)
        what = f"Qwen3-{model} silu_mul_linear {2 * inner}x{hidden}, {m} rows"
        found.append(
            compared(
                what, ours, "us", peer="cuBLAS and two kernels", peer_value=theirs, at_most=BAR
            )
        )
    return found


def summary(products: Sequence[Row]) -> list[Row]:
    """Return counts over all measured products."""
    shares, of_weight = (
        [row for row in products if row.what.endswith(end)] for end in (FLOOR, WEIGHT_FLOOR)
    )
    large, beside = "large weights, up to 64 rows", [row for row in products if row.peer]
    spread = [row.value for row in products if row.what.endswith(ITSELF)]
    at_most = max(spread)
    return [
        measured(f"products of decoding: {ITSELF}, the median", statistics.median(spread), ""),
        measured(f"products of decoding: {ITSELF}, the farthest", at_most, ""),
        counted(
            "products of decoding: cuBLAS's best or less, to within what that differs from itself",
            [row.value <= at_most * (row.peer_value or 0) for row in beside],
        ),
        counted(
            f"products of decoding: {BAR}x cuBLAS's best or less",
            [row.holds is True for row in beside],
        ),
        counted(
            "products of decoding: cuBLAS's best or less",
            [row.value <= (row.peer_value or 0) for row in beside],
            all_must=False,
        ),
        counted(f"{large}: {FLOOR} {FLOOR_BAR} or more", [row.holds is True for row in shares]),
        counted(
            f"{large}: {WEIGHT_FLOOR} {FLOOR_BAR} or more",
            [row.value >= FLOOR_BAR for row in of_weight],
            all_must=False,
        ),
    ]


def main() -> int:
    copy = copy_bytes_per_s()
    rows = [measured("copy, read and written", copy / 1e12, "TB/s")]
    decoding = [row for name, shape in shapes().items() for row in measure(name, *shape, copy)]
    rows += decoding + summary(decoding)
    rows += [row for model in QWEN3 for row in measure_gated(model)]
    rows += [measure_pack(name, *shape) for name, shape in shapes().items()]
    bars = [row.holds for row in rows if row.holds is not None]
    print(f"{sum(bars)} of {len(bars)} bars hold")
    packages = ("torch", "triton", "nvidia-cutlass-dsl")
    return finish(__file__, packages, rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
