"""cuBLAS's candidates for a matrix product: the one that torch takes, and those of cublasLt."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.kernels.linear.cublaslt import Gemm, Shape, propose_algorithms

LENT_BYTES = 32 << 20  # workspace that torch gives cuBLAS on Hopper


def by_torch(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is not None:
        torch.addmm(bias, x, weight.t(), out=out)
    elif out.dtype == x.dtype:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def every_way(shape: Shape) -> list[Gemm]:
    """Return torch's candidate, then all others. With workspace, cuBLAS may split K."""
    return [by_torch, *propose_algorithms(shape, (0, LENT_BYTES))]
