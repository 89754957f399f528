"""Variants of the trainer's arithmetic, as context managers that swap its operations.

contract   as shipped
free       cuBLAS picks the matrix products, with split-K allowed; the rest as shipped
raced      the same, with cuBLAS's fastest candidate for each shape, whatever its bits
torch      as free, with torch's own norms, rotary positions and log-probs, none of them fused
repeats    as shipped, with a backward pass that also repeats its bits (trainer.deterministic)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.cublas import every_way
from spmd_rl.kernels import QkNorm, Rotary, Scores
from spmd_rl.kernels.attention import token_attention
from spmd_rl.kernels.linear import dispatch
from spmd_rl.kernels.linear.cublas import fastest
from spmd_rl.kernels.linear.cublaslt import Gemm, Shape
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.vocab.lm_head import Logits
from spmd_rl.model import scorer
from spmd_rl.model.layers import norm_module
from spmd_rl.train.fsdp2.determinism import WORKSPACE, WORKSPACES, deterministic

os.environ.setdefault(WORKSPACE, WORKSPACES[0])  # torch's own default on Hopper


@contextmanager
def swapped(*swaps: tuple[object, str, Callable[..., object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, other in swaps:
            stack.enter_context(patch.object(owner, name, other))
        yield


def free_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, x, weight.t())
    return torch.mm(x, weight.t(), **({"out_dtype": out_dtype} if out_dtype != x.dtype else {}))


class Race:
    """Matrix products that each use the fastest of `ways_of` their shape.

    The first product of a shape also takes the time to find it. It must not run while a graph is
    recorded.
    """

    def __init__(self, ways_of: Callable[[Shape], list[Gemm]]) -> None:
        self._ways_of = ways_of
        self._chosen: dict[Shape, Gemm] = {}

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        shape = Shape(*weight.shape, len(x), bias is not None, out_dtype, x.device)
        if shape not in self._chosen:
            self._chosen[shape] = fastest(self._ways_of(shape), shape)
        out = x.new_empty(shape.rows, shape.n, dtype=out_dtype)
        self._chosen[shape](out, dense(x), dense(weight), None if bias is None else dense(bias))
        return out


def torch_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def torch_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    summed = residual + x
    return torch_norm(summed, weight, eps), summed


def torch_norm_rope(q: Tensor, k: Tensor, norm: QkNorm, rotary: Rotary) -> tuple[Tensor, Tensor]:
    positions, *table = rotary
    cos, sin = (one.index_select(0, positions).to(q.dtype).unsqueeze(1) for one in table)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    assert norm.q_weight is not None and norm.k_weight is not None
    q, k = torch_norm(q, norm.q_weight, norm.eps), torch_norm(k, norm.k_weight, norm.eps)
    return turned(q), turned(k)


def torch_logprobs(
    logits: Tensor, targets: Tensor, inv_temperature: Tensor
) -> tuple[Tensor, Tensor]:
    log_probs = (logits * inv_temperature.unsqueeze(1)).log_softmax(1)
    entropy = -(log_probs.detach().exp() * log_probs.detach()).sum(1)
    return log_probs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def torch_head(
    hidden: Tensor,
    weight: Tensor,
    logits: Logits,
    targets: Tensor,
    inv_temperature: Tensor,
    num_rows: int,
    **options: object,
) -> Scores:
    """Return what `head_logprobs` returns without options."""
    del weight, options

    def score(part: slice) -> tuple[Tensor, Tensor]:
        return torch_logprobs(logits(hidden[part]), targets[part], inv_temperature[part])

    parts = [slice(start, start + num_rows) for start in range(0, len(hidden), num_rows)]
    scores = [checkpoint(score, part, use_reentrant=False) for part in parts]
    logprobs, entropies = zip(*scores, strict=True)
    return Scores(torch.cat(logprobs), torch.cat(entropies), None)


FREE = ((dispatch, "matmul", free_product),)
RACED = ((dispatch, "matmul", Race(every_way)),)
TORCH = (
    *FREE,
    (norm_module, "rms_norm", torch_norm),
    (norm_module, "add_rms_norm", torch_add_norm),
    (token_attention, "qk_norm_rope", torch_norm_rope),
    (scorer, "head_logprobs", torch_head),
)
VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "contract": nullcontext,
    "free": lambda: swapped(*FREE),
    "raced": lambda: swapped(*RACED),
    "torch": lambda: swapped(*TORCH),
    "repeats": deterministic,
}
