"""Outputs of a decoding step, in one launch: for the next step, and for the host.

The kernel itself writes the host's memory: copies behind a graph would delay the next graph.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels.runtime.pdl import overlapping, wait

BLOCK = 512


def decode_outputs(
    tokens: Tensor,
    logprobs: Tensor,
    rows: Tensor,
    newest: Tensor,
    host_tokens: Tensor,
    host_logprobs: Tensor,
    turn: Tensor,
    routes: Tensor | None = None,
    host_routes: Tensor | None = None,
) -> None:
    """Store each row's token as its newest, and all results in the host's row `turn` modulo T.

    `turn` is then increased by 1. `routes` are the hashes of the experts that a mixture's rows went
    to (moe/route_hash.py).
    Shape: tokens and rows [B] int64, logprobs [B] fp32; newest [num_rows + 1] int64. Pinned host
    memory: tokens [T, N] int64 and log-probs [T, N] fp32 with B <= N. turn [1] int64. routes [B]
    int64, and on the host [T, N] int32.
    """
    has_routes = routes is not None and host_routes is not None
    _outputs[(1,)](
        tokens, logprobs, rows, newest, host_tokens, host_logprobs, turn,
        routes if has_routes else turn, host_routes if has_routes else turn, len(rows),
        *host_tokens.shape, has_routes, BLOCK, **overlapping(),
    )  # fmt: skip


@triton.jit
def _outputs(
    tokens, logprobs, rows, newest, host_tokens, host_logprobs, turn, routes, host_routes, batch,
    turns, width, HAS_ROUTES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    wait()
    now = tl.load(turn) % turns
    for start in range(0, batch, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        inside = entry < batch
        token = tl.load(tokens + entry, mask=inside)
        tl.store(newest + tl.load(rows + entry, mask=inside, other=0), token, mask=inside)
        tl.store(host_tokens + now * width + entry, token, mask=inside)
        tl.store(
            host_logprobs + now * width + entry, tl.load(logprobs + entry, mask=inside), mask=inside
        )
        if HAS_ROUTES:
            state = tl.load(routes + entry, mask=inside, other=0)
            short = (state ^ (state >> 32)).to(tl.int32)
            tl.store(host_routes + now * width + entry, short, mask=inside)
    tl.store(turn, now + 1)
