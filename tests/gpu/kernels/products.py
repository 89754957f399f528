"""Matrix products of Qwen3, and one that breaks the contract."""

from __future__ import annotations

from torch import Tensor

from benchmarks.shapes import HEAD_DIM, QWEN3
from spmd_rl.kernels import linear_fp32

Widths = tuple[int, ...]  # rows of each weight


def layer(name: str) -> dict[str, tuple[Widths, int]]:
    """Return a layer's projections that have one input, and the input's size."""
    hidden, inner, _, heads, kv_heads, _ = QWEN3[name]
    width, kv_width = heads * HEAD_DIM, kv_heads * HEAD_DIM
    return {
        "qkv": ((width, kv_width, kv_width), hidden),
        "o": ((hidden,), width),
        "gate_up": ((inner, inner), hidden),
        "down": ((hidden,), inner),
    }


def shapes(*names: str) -> list[tuple[int, int]]:
    """Return (N, K) of the models, or of all, fused and separate."""
    products = [product for name in names or QWEN3 for product in layer(name).values()]
    return sorted({(n, k) for widths, k in products for n in (*widths, sum(widths))})


def split_in_two(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in two chains over K, each half as long."""
    half = x.shape[1] // 2
    return linear_fp32(x[:, :half], weight[:, :half]) + linear_fp32(x[:, half:], weight[:, half:])
