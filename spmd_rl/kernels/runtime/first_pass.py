"""What a part of a forward pass keeps for when it is computed again for the backward pass.

The part asks `kept_before` for each value. In the first pass that gives None, and the part makes
the value and keeps it. In the second one it gets the values in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Out = TypeVar("Out")

_first: ContextVar[list[Any] | None] = ContextVar("values of a first pass", default=None)
_again: ContextVar[Iterator[Any] | None] = ContextVar("values kept before", default=None)


def computed_again(part: Callable[..., Out]) -> Callable[..., Out]:
    """Return `part` as one that keeps its inputs alone, and is computed again for its gradient."""
    return partial(checkpoint, part, use_reentrant=False, context_fn=both_passes)


def both_passes() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first and the second pass of one part.

    It is a `context_fn` of torch's checkpoint.
    """
    kept: list[Any] = []
    return _first_pass(kept), _second_pass(kept)


def kept_before() -> Any:
    """Return the next value that the first pass kept; None in any other pass."""
    values = _again.get()
    return None if values is None else next(values)


def keep(value: Any) -> None:
    """Keep a value, without gradient, for the second pass if there will be one."""
    if (kept := _first.get()) is not None:
        kept.append(value)


@contextmanager
def _first_pass(kept: list[Any]) -> Iterator[None]:
    token = _first.set(kept)
    try:
        yield
    finally:
        _first.reset(token)


@contextmanager
def _second_pass(kept: list[Any]) -> Iterator[None]:
    token = _again.set(iter(kept))
    try:
        yield
    finally:
        _again.reset(token)
