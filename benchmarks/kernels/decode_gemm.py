"""Decode matrix products of Qwen3 against cuBLAS's best, split-K allowed: microseconds, weights cold in L2.

Ours keeps one ascending chain over K (docs/numerics.md). Each number is the median over replays of a graph that runs
the product for many copies of the weight, for some 1 ms, ours and cuBLAS's in turns; ours overlap at their ends, as in
the engine. cuBLAS's best is the fastest, in a shorter run before, of what torch.mm takes and all that cublasLt
proposes, with memory for partial sums and without. The floor is the time to move weight, x and result once, at the
speed of a large copy just before, or to do the arithmetic at that of a large product, whichever is longer; beside it,
without a bar, stands that of the weight alone.

Gate and up with SiLU and the product between them (`silu_mul_linear`) stand beside cuBLAS's joined product and torch's
two kernels.

    python -m benchmarks.kernels.decode_gemm [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import copy_bytes_per_s, in_turns
from benchmarks.record import compared, finish, gpu, measured
from benchmarks.shapes import HEAD_DIM, MEASURED_FLOPS_PER_S, QWEN3, VOCAB
from benchmarks.table import Row
from spmd_rl.kernels import silu_mul_linear
from spmd_rl.kernels.cublaslt import Shape, proposed
from spmd_rl.kernels.linear_plan import matmul

ROWS = (1, 16, 64, 128, 256)
COLD_BYTES = 256 << 20
MAX_COPIES = 64
WORKSPACES = (0, 32 << 20)  # none, and as much as torch lends cuBLAS on Hopper
TRIAL_ROUNDS, TRIAL_REPLAYS = 4, 9
BAR = 1.02  # at or under cuBLAS, to within the spread of repeats
FLOOR_BAR = 0.85
LARGE_BYTES = 30e6


def shapes() -> dict[str, tuple[int, int, torch.dtype]]:
    """Name -> (N, K, type of the result); q, k, v and gate, up both joined and apart."""
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


def cublas_best(x: Tensor, weights: list[Tensor], out_dtype: torch.dtype) -> Callable[[Tensor], object]:
    widen = {"out_dtype": out_dtype} if out_dtype != x.dtype else {}
    shape = Shape(*weights[0].shape, len(x), False, out_dtype, x.device)
    out = x.new_empty(shape.rows, shape.n, dtype=out_dtype)
    ways: list[Callable[[Tensor], object]] = [lambda w: torch.mm(x, w.t(), **widen)]
    ways += [lambda w, way=way: way(out, x, w, None) for size in WORKSPACES for way in proposed(shape, size)]
    times = in_turns(ways, weights, TRIAL_ROUNDS, TRIAL_REPLAYS)
    return ways[times.index(min(times))]


def measure(name: str, n: int, k: int, out_dtype: torch.dtype, bytes_per_s: float) -> list[Row]:
    weights, found = cold_weights(n, k), []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").bfloat16()
        best = cublas_best(x, weights, out_dtype)
        ours, cublas = in_turns([lambda w, x=x: matmul(x, w, None, out_dtype), best], weights)
        what = f"{name} {n}x{k}, {m} rows"
        found.append(compared(what, ours, "us", peer="cuBLAS's best", peer_value=cublas, at_most=BAR))
        if m <= 64 and 2 * n * k >= LARGE_BYTES:
            weight, others = 2 * n * k, 2 * m * k + out_dtype.itemsize * m * n
            share, of_weight = (floor_us(m, n, k, each, bytes_per_s) / ours for each in (weight + others, weight))
            found.append(measured(f"{what}, share of floor", share, "", at_least=FLOOR_BAR))
            found.append(measured(f"{what}, share of the weight's floor", of_weight, ""))
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
        found.append(compared(what, ours, "us", peer="cuBLAS and two kernels", peer_value=theirs, at_most=BAR))
    return found


def main() -> int:
    copy = copy_bytes_per_s()
    rows = [measured("copy, read and written", copy / 1e12, "TB/s")]
    rows += [row for name, shape in shapes().items() for row in measure(name, *shape, copy)]
    rows += [row for model in QWEN3 for row in measure_gated(model)]
    print(f"{sum(row.holds is True for row in rows)} of {sum(row.holds is not None for row in rows)} bars hold")
    packages = ("torch", "triton", "nvidia-cutlass-dsl")
    return finish(__file__, packages, rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
