"""Calling an op that brings its own gradient: without one wanted, autograd's bookkeeping costs more
than a small op.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function


class _NoBackward(SimpleNamespace):
    """Stands in for the context of a forward pass that no backward pass follows."""

    needs_input_grad = (False,)

    def save_for_backward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...


def call(function: type[Function], *inputs: Any) -> Any:
    """`function` of `inputs`: by autograd where gradients are enabled, else its forward alone, with
    the same bits.
    """
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoBackward(), *inputs)
