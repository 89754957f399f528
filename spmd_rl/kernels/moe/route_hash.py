"""Hash of the experts that each token went to, over all layers of a forward pass.

Trainer and engine compare it. A flip that the log-prob of the chosen token hides is seen so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

ROUTES = "routes"  # the column of a token's hash
_FACTOR = 6364136223846793005  # odd, so that no two sums have the same product; on GPUs as well


class RouteHash:
    """The hash of each row so far: `state` [T] int64 is None for a model without experts."""

    def __init__(self, state: Tensor | None = None) -> None:
        self.state = state

    def add(self, ids: Tensor) -> None:
        """Add the experts of a layer. Shape: ids [T, K] int64, in slot order."""
        state = ids.new_zeros(len(ids)) if self.state is None else self.state
        for slot in ids.unbind(1):
            state = (state + slot + 1) * _FACTOR
            state = state ^ (state >> 29)
        self.state = state

    def of_rows(self, rows: Tensor) -> Tensor | None:
        """Return the hash of these rows. Shape: rows [M] int64; returns [M] int32."""
        if self.state is None:
            return None
        return short(self.state.index_select(0, rows))


def short(state: Tensor) -> Tensor:
    """Return the hash of each row as it is kept with a token. Shape: [M] int64; returns int32."""
    return (state ^ (state >> 32)).to(torch.int32)


_open: ContextVar[RouteHash | None] = ContextVar("route hash", default=None)


@contextmanager
def hashed_routes() -> Iterator[RouteHash]:
    """Hash the routes of the forward pass inside. A pass that is computed again does not count."""
    token = _open.set(found := RouteHash())
    try:
        yield found
    finally:
        _open.reset(token)


def open_hash() -> RouteHash | None:
    """Return the hash that is open, to which a forward pass adds its routes."""
    return _open.get()


def note_routes(ids: Tensor) -> None:
    """Add the routes of a layer to the hash that is open, if one is. Shape: ids [T, K] int64."""
    if (found := open_hash()) is not None:
        found.add(ids.detach())
