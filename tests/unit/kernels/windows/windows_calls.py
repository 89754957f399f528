"""Calls of the kernels of attention in windows, for the interpreter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.windows.windows import PackedWindows, PagedWindows

CPU = torch.device("cpu")


def packed(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lengths: list[int], window: int
) -> Tensor:
    with torch.no_grad():
        return PackedWindows(np.array(lengths), CPU)(q, k, v, sinks, window)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, grad: Tensor, lengths: list[int], window: int
) -> tuple[Tensor, ...]:
    given = [one.requires_grad_() for one in (q, k, v, sinks)]
    out = PackedWindows(np.array(lengths), CPU)(q, k, v, sinks, window)
    return torch.autograd.grad(out, given, grad)


def paged(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    pages: Tensor,
    starts: list[int],
    lengths: list[int],
    window: int,
) -> Tensor:
    """Attend to pages [N, P, K, D] of sequences that have `starts` tokens before `lengths`.

    The table of tiles has room for sequences that are not there.
    """
    counts = torch.tensor(lengths, dtype=torch.int32)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    num_keys = torch.tensor(starts, dtype=torch.int32) + counts
    attend = PagedWindows(pages.int(), num_keys, bounds, len(q) + 9)
    return attend(q, keys, values, sinks, window)
