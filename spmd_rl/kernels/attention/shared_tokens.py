"""Attention of ranks that share the tokens of a forward pass: between two all-to-alls, each rank
has all tokens of some heads.

A kernel sees whole sequences, so a token has the bits that it has on one rank. Tokens are dealt out
in turn: of P ranks, rank r has the tokens r, r + P, r + 2 P and so on. So prompts and answers are
shared evenly, and to put tokens in order is to transpose.
Source: Jacobs et al., DeepSpeed Ulysses (2023), section 3.

Shape letters: T tokens of the pass, N rows of a rank; P ranks; H heads of all, h of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.errors import ContractError
from spmd_rl.kernels.attention.token_attention import WHOLE, Reach, TokenAttention
from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.kernels.runtime.differentiable import call


@dataclass(frozen=True)
class SharedTokens:
    """The `count` tokens of a pass, dealt out among the ranks of `group`.

    Every rank has as many rows. The last one may be padding, which no token sees.
    """

    count: int
    group: dist.ProcessGroup

    @property
    def num_rows(self) -> int:
        """The rows of each rank, with padding; at least one."""
        return max(1, -(-self.count // self.group.size()))

    @property
    def num_own(self) -> int:
        """The tokens that this rank has."""
        return len(range(self.group.rank(), self.count, self.group.size()))

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of `x` [T, ...], side by side as kernels read them."""
        return x[self.group.rank() :: self.group.size()].contiguous()

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows of `x` [T, ...]; padding is zero. Shape: returns [N, ...]."""
        return _padded(self.own(x), self.num_rows)


class SharedAttention(TokenAttention):
    """Another attention, of whole heads, for the rows of `tokens` that this rank has.

    The number of ranks divides that of keys' heads. All ranks of the group call it together.
    """

    def __init__(self, attend: TokenAttention, tokens: SharedTokens) -> None:
        self._attend = attend
        self._tokens = tokens

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        """Shape: q [N', H, D], k and v [N', K, D], with N' >= N; returns [N', H, D]."""
        tokens, size = self._tokens, self._tokens.group.size()
        by_rank = [one[: tokens.num_rows].unflatten(1, (size, -1)) for one in (q, k, v)]
        whole = call(_ToHeads, torch.cat(by_rank, 2), tokens)
        parts = whole.split([one.shape[2] for one in by_rank], 1)
        assert reach.is_whole, "ranks do not share layers with windows or sinks"
        out = self._attend(layer, *(one.contiguous() for one in parts))
        own = call(_ToTokens, out[: tokens.count], tokens)
        return _padded(own.flatten(1, 2), len(q))

    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        raise ContractError("ranks that share tokens share heads, and these rows have none")

    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        raise ContractError("ranks that share tokens share heads, and no states of sequences")


class _ToHeads(torch.autograd.Function):
    """The tokens of all ranks, of this rank's heads. Shape: [N, P, h, D] to [T, h, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: SharedTokens) -> Tensor:
        ctx.tokens = tokens
        return _to_heads(x, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grads[0], ctx.tokens), None


class _ToTokens(torch.autograd.Function):
    """The heads of all ranks, of this rank's tokens. Shape: [T, h, D] to [N, P, h, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: SharedTokens) -> Tensor:
        ctx.tokens = tokens
        return _to_tokens(x, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0], ctx.tokens), None


def _to_heads(x: Tensor, tokens: SharedTokens) -> Tensor:
    by_rank = _exchanged(x.transpose(0, 1), tokens.group)
    return by_rank.transpose(0, 1).flatten(0, 1)[: tokens.count]


def _to_tokens(x: Tensor, tokens: SharedTokens) -> Tensor:
    size = tokens.group.size()
    by_rank = _padded(x, tokens.num_rows * size).unflatten(0, (-1, size)).transpose(0, 1)
    return _exchanged(by_rank, tokens.group).transpose(0, 1)


def _exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return what each rank has for this one. Shape: [P, ...], by receiver and then by sender."""
    sent = x.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


def _padded(x: Tensor, num_rows: int) -> Tensor:
    """Append zero rows to `x` up to `num_rows`."""
    missing = num_rows - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x
