"""Calls of ops with their own gradient that skip autograd where none is wanted.

Autograd's bookkeeping costs more time than a small op.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import Function


class _NoBackward(SimpleNamespace):
    """Context of a forward pass that no backward pass follows."""

    needs_input_grad = (False,)

    def save_for_backward(self, *tensors: Any) -> None: ...

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def call(function: type[Function], *inputs: Any) -> Any:
    """Apply `function` through autograd where gradients are enabled, else its forward alone."""
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_NoBackward(), *inputs)
