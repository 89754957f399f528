"""Parameters that no optimizer changes, and that are float32 whatever their model computes in.

They travel with a model's other weights: into folders, checkpoints and pushes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class HoldsFixed(nn.Module):
    """A module with fixed parameters, which its layer marks so (`TensorSpec.is_fixed`)."""

    def fix(self, name: str, *shape: int) -> None:
        """Give the module a fixed parameter of zeros."""
        zeros = torch.zeros(shape, dtype=torch.float32)
        self.register_parameter(name, nn.Parameter(zeros, requires_grad=False))
        self._fixed: tuple[str, ...] = (*getattr(self, "_fixed", ()), name)

    def _apply(self, fn: Callable[[Tensor], Tensor], *arguments: Any, **named: Any) -> Any:
        """Apply `fn` as ever, but keep the dtype of what is fixed."""
        fixed = {id(self._parameters[name]) for name in self._fixed}

        def keeping(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if id(tensor) not in fixed or out.dtype == tensor.dtype:
                return out
            return fn(tensor.view(torch.int32)).view(tensor.dtype)  # integers are not cast

        return super()._apply(keeping, *arguments, **named)
