"""The experts that each token went to, kept layer by layer for whoever records them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor


class KeptRoutes:
    """The routes of a forward pass so far, a tensor a mixture."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []

    def add(self, ids: Tensor) -> None:
        """Keep the routes of a layer. Shape: ids [T, K] int64, in slot order."""
        self._ids.append(ids)

    def joined(self, dtype: torch.dtype) -> Tensor:
        """Return the routes of all layers. Shape: [T, L * K]."""
        return torch.cat(self._ids, 1).to(dtype)


_open: ContextVar[KeptRoutes | None] = ContextVar("kept routes", default=None)


@contextmanager
def kept_routes() -> Iterator[KeptRoutes]:
    """Keep the routes of the forward pass inside."""
    token = _open.set(kept := KeptRoutes())
    try:
        yield kept
    finally:
        _open.reset(token)


def keep_routes(ids: Tensor) -> None:
    """Keep the routes of a layer, if anyone records them. Shape: ids [T, K] int64."""
    if (kept := _open.get()) is not None:
        kept.add(ids.detach())
