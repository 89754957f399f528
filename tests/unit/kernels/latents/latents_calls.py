"""Calls of the kernels of attention to latents, for the interpreter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spmd_rl.kernels.latents.backend import PackedLatents, PagedLatents
from spmd_rl.kernels.latents.of_heads_triton import products_of_heads
from spmd_rl.kernels.latents.sizes import LatentSizes
from spmd_rl.kernels.rowwise.kv_write_triton import write_rows

CPU = torch.device("cpu")


def packed(q: Tensor, keys: Tensor, lengths: list[int], sizes: tuple[int, int]) -> Tensor:
    attend = PackedLatents(np.array(lengths), LatentSizes(*sizes), CPU)
    with torch.no_grad():
        return attend(q, keys[:, None], keys[:, None])


def gradients(
    q: Tensor, keys: Tensor, grad: Tensor, lengths: list[int], sizes: tuple[int, int]
) -> tuple[Tensor, ...]:
    given = q.requires_grad_(), keys[:, None].requires_grad_()
    attend = PackedLatents(np.array(lengths), LatentSizes(*sizes), CPU)
    return torch.autograd.grad(attend(*given, keys[:, None]), given, grad)


def paged(
    q: Tensor, keys: Tensor, pages: Tensor, starts: list[int], lengths: list[int], latent: int
) -> Tensor:
    """Attend to the pages [N, 64, D] of sequences that have `starts` tokens before `lengths`.

    The table of tiles has room for sequences that are not there.
    """
    counts = torch.tensor(lengths, dtype=torch.int32)
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    num_keys = torch.tensor(starts, dtype=torch.int32) + counts
    sizes = LatentSizes(latent, q.shape[-1] - latent)
    attend = PagedLatents(pages.int(), num_keys, bounds, len(q) + 9, sizes)
    return attend(q, keys, keys)


def products(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Also return the products of a slice of x with weights that are turned around."""
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([x, x], -1)[..., : x.shape[-1]]
    return products_of_heads(x, weights), products_of_heads(wide, turned)


def written(keys: Tensor, slots: Tensor, k: Tensor) -> Tensor:
    write_rows(keys, None, slots, k, k, None)
    return keys
