"""Attention in windows for packed sequences and for pages of a cache, on NVIDIA GPUs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.row_tiles.tiles import (
    PAGE,
    PackedTiles,
    RowTiles,
    row_tiles,
    sequences_in_pages,
)
from spmd_rl.kernels.runtime.differentiable import call
from spmd_rl.kernels.runtime.padding import dense
from spmd_rl.kernels.windows.sinks import gradient_of_sinks


class PagedWindows:
    """Attention of new tokens to the pages of their sequences, in windows.

    Shape: as `flash.PagedFlash`, with `bounds` [B + 1]; nothing is read on the host.
    """

    def __init__(self, pages: Tensor, num_keys: Tensor, bounds: Tensor, num_tokens: int) -> None:
        self._given = pages, num_keys, bounds
        self._num_tokens = num_tokens
        self._tiles: dict[int, RowTiles] = {}

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, window: int
    ) -> Tensor:
        from spmd_rl.kernels.windows.attend_triton import attend_in_window

        page_size, group = keys.shape[1], q.shape[1] // keys.shape[2]
        if group not in self._tiles:
            given = sequences_in_pages(*self._given, page_size)
            self._tiles[group] = row_tiles(given, group, PAGE, self._num_tokens)
        pages = keys.flatten(0, 1), values.flatten(0, 1)
        return attend_in_window(q, *pages, sinks, window, self._tiles[group], page_size).out


class PackedWindows:
    """Attention within sequences laid end to end, in windows, differentiable.

    Shape: q [T', H, D], k and v [T', K, D], T' the number of tokens or that padded to the row tile.
    """

    def __init__(self, lengths: NDArray[np.int64], device: torch.device) -> None:
        self._tiles = PackedTiles(lengths, device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, window: int
    ) -> Tensor:
        tiles = self._tiles.of(len(q), q.shape[1] // k.shape[1], PAGE)
        return call(_PackedWindows, q, k, v, sinks, window, tiles)


class _PackedWindows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        window: int,
        tiles: tuple[RowTiles, RowTiles],
    ) -> Tensor:
        from spmd_rl.kernels.windows.attend_triton import attend_in_window

        q, k, v = dense(q), dense(k), dense(v)
        found = attend_in_window(q, k, v, sinks, window, tiles[0], PAGE)
        ctx.save_for_backward(q, k, v, sinks, *found)
        ctx.tiles, ctx.window = tiles, window
        return found.out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from spmd_rl.kernels.windows.attend_triton import Attended
        from spmd_rl.kernels.windows.gradients_triton import WindowRows, window_gradients

        q, k, v, sinks, *found = ctx.saved_tensors
        attended, grad = Attended(*found), dense(grads[0])
        rows, blocks = ctx.tiles
        made = window_gradients(WindowRows(q, k, v), attended, grad, ctx.window, rows, blocks)
        of_sinks = None
        if sinks is not None:
            of_sinks = gradient_of_sinks(sinks, attended.log_sum * math.log(2), made.inner)
        return made.q, made.k, made.v, of_sinks, None, None
