"""A SymmExchange of each of several ranks (peer_ranks.py), for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd_rl.kernels.linear import peer_sums_triton, symm_exchange
from spmd_rl.kernels.linear.symm_exchange import SymmExchange
from tests.unit.kernels.peer_ranks import on_ranks

peer_sums_triton.BLOCK = 64
symm_exchange.EXCHANGE_BYTES = 1024  # a few rows, so that a call takes several turns


def summed(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, alternates: bool) -> Tensor:
    """The sums of several calls, one behind the other; without `alternates`, in one buffer.

    Shape: parts [P, L, T, N]; returns [P, L, T, N].
    """

    def run(group: Any) -> Tensor:
        exchange, found = SymmExchange(group), []
        for part in parts[group.rank()]:
            found.append(exchange.sum(part, bias, dtype))
            if not alternates:
                exchange._buffers.turns.zero_()
        return torch.stack(found)

    return on_ranks(run, len(parts))


def gathered(own: Tensor, parts: Tensor) -> Tensor:
    """Columns of all ranks, with sums between. Shape: own [P, L, M, N]; returns [P, L, M, P N]."""

    def run(group: Any) -> Tensor:
        exchange, found = SymmExchange(group), []
        for one in own[group.rank()]:
            found.append(exchange.gather_columns(one))
            exchange.sum(parts[group.rank()], None, torch.float32)
        return torch.stack(found)

    return on_ranks(run, len(own))
