"""A SymmExchange of each of several ranks (peer_ranks.py), for Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.linear import peer_sums_triton, symm_exchange
from spmd_rl.kernels.linear.later_sum import LaterSum
from spmd_rl.kernels.linear.linear import linear_fp32
from spmd_rl.kernels.linear.row_shards import RowParallel
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from spmd_rl.kernels.rowwise.norm import add_rms_norm
from spmd_rl.kernels.rowwise.norm_triton import add_rms_norm_forward
from spmd_rl.model.hf import random_weights
from spmd_rl.model.parts.part import ModelPart
from tests.shared_ranks import part_of_model
from tests.specs import dense_spec
from tests.unit.kernels.peer_ranks import on_ranks

peer_sums_triton.BLOCK = 64
EPS = 1e-6
symm_exchange.EXCHANGE_BYTES = 1024  # a few rows, so that a call takes several turns


def summed(
    parts: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    alternates: bool = True,
    large_bytes: int = symm_exchange.LARGE_BYTES,
) -> Tensor:
    """The sums of several calls, one behind the other; without `alternates`, in one buffer.

    Those of parts of `large_bytes` are large. Shape: parts [P, L, T, N]; returns [P, L, T, N].
    """

    symm_exchange.LARGE_BYTES = large_bytes

    def run(group: Any) -> Tensor:
        exchange, found = SymmExchange(group), []
        for part in parts[group.rank()]:
            found.append(exchange.sum(part, bias, dtype))
            if not alternates:
                exchange._buffers.turns.zero_()
        return torch.stack(found)

    return on_ranks(run, len(parts))


def mixed(parts: Tensor, few: Tensor, large_bytes: int) -> tuple[Tensor, Tensor]:
    """Sums of several calls, large ones and others in turn.

    Shape: [P, L, T, N] and [P, L, t, N], given and returned.
    """
    symm_exchange.LARGE_BYTES = large_bytes

    def run(group: Any) -> Tensor:
        exchange, found = SymmExchange(group), []
        for pair in zip(parts[group.rank()], few[group.rank()], strict=True):
            found.append(torch.cat([exchange.sum(one, None, torch.float32) for one in pair]))
        return torch.stack(found)

    return on_ranks(run, len(parts)).split([parts.shape[2], few.shape[2]], 2)


def normed(
    operands: tuple[Tensor, Tensor], bias: Tensor | None, norm: tuple[Tensor, Tensor], shards: int
) -> Tensor:
    """What ranks give a norm of their row-parallel products, two of which follow each other.

    Shape: operands [P, T, K / P] and [P, N, K / P], norm [T, N] and [N]; returns [P, 4, T, N].
    """
    x, weight = operands

    def run(group: Any) -> Tensor:
        product = RowParallel(shards // len(x), SymmExchange(group))
        own, found, residual = (x[group.rank()], weight[group.rank()]), [], norm[0]
        for _ in range(2):
            later = product(*own, bias)
            assert isinstance(later, LaterSum)
            out, residual = add_rms_norm(later, residual, norm[1], EPS)
            found += [out, residual]
        return torch.stack(found)

    with torch.no_grad():
        return on_ranks(run, len(x))


def normed_alone(
    operands: tuple[Tensor, Tensor],
    bias: Tensor | None,
    norm: tuple[Tensor, Tensor],
    shards: int,
    in_order: bool = False,
) -> Tensor:
    """The same of one rank, from the kernel of the norm; perhaps with parts added in their order.

    Shape: operands [T, K] and [N, K], norm as in `normed`; returns [4, T, N].
    """
    found, residual = [], norm[0]
    with torch.no_grad():
        product = RowParallel(shards)(*operands, bias)
        if in_order:
            product = _in_order(*operands, shards).to(product.dtype)
    for _ in range(2):
        out, residual, _ = add_rms_norm_forward(product, residual, norm[1], EPS)
        found += [out, residual]
    return torch.stack(found)


def _in_order(x: Tensor, weight: Tensor, shards: int) -> Tensor:
    first, *others = map(linear_fp32, x.chunk(shards, 1), weight.chunk(shards, 1))
    return sum(others, first)


def taken(parts: Tensor, dtype: torch.dtype, large_bytes: int) -> Tensor:
    """What others than a norm get of a sum, between two that norms take; and the last norm.

    Shape: parts [P, T, N]; returns [P, 3, T, N].
    """
    symm_exchange.LARGE_BYTES = large_bytes

    def run(group: Any) -> Tensor:
        exchange, part = SymmExchange(group), parts[group.rank()]
        beside = parts[0], parts[0, 0], EPS
        add_rms_norm(exchange.sum_later(part, None, dtype), *beside)
        later = exchange.sum_later(part, None, dtype)
        found = [later * 2, later]
        found.append(add_rms_norm(exchange.sum_later(part, None, dtype), *beside)[0])
        return torch.stack(found)

    return on_ranks(run, len(parts))


def logits(num_ranks: int, shards: int) -> Tensor:
    """What ranks that share a model compute. Shape: [P, T, V]."""
    spec = replace(
        dense_spec("llama", vocab=48, hidden=40, inner=48, layers=2, heads=(8, 4, 4), positions=9,
                   out_bias=True, mlp_bias=True, init_std=0.3),
        row_shards=shards,
    )  # fmt: skip
    weights = dict(random_weights(spec, 1))
    tokens, positions = torch.arange(9) * 5, torch.arange(9)

    def run(group: Any) -> Tensor:
        part = ModelPart(group.rank(), num_ranks, SymmExchange(group))
        model = part_of_model(spec, weights, part)
        attend = PackedAttention(np.array([9], np.int32), device=torch.device("cpu"))
        return model(tokens, positions, attend, torch.arange(9))

    with torch.no_grad():
        return on_ranks(run, num_ranks)


def gathered(own: Tensor, parts: Tensor) -> Tensor:
    """Columns of all ranks, with sums between. Shape: own [P, L, M, N]; returns [P, L, M, P N]."""

    def run(group: Any) -> Tensor:
        exchange, found = SymmExchange(group), []
        for one in own[group.rank()]:
            found.append(exchange.gather_columns(one))
            exchange.sum(parts[group.rank()], None, torch.float32)
        return torch.stack(found)

    return on_ranks(run, len(own))
