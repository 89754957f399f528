"""Rows of a forward pass that belong to a token; the others are padding of a recorded graph.

Dense layers compute padding at no cost. Experts' weights would be read for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_used: ContextVar[Tensor | None] = ContextVar("rows in use", default=None)


@contextmanager
def using_rows(slots: Tensor) -> Iterator[None]:
    """Within, rows whose slot in the cache is negative are padding. Shape: slots [T] int64."""
    token = _used.set(slots)
    try:
        yield
    finally:
        _used.reset(token)


def rows_in_use() -> Tensor | None:
    """Return each row's slot, negative for padding; None where every row is used."""
    return _used.get()
