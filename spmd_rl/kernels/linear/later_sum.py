"""LaterSum: a sum over ranks that the norm behind it takes in its own kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

TakeAndNorm = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


class LaterSum(Tensor):
    """A tensor whose elements are computed when they are first asked for. It has no gradient.

    Whatever takes it as a tensor gets what `take` returns. `add_rms_norm` (rowwise/norm.py) asks
    `norm` instead, with its other arguments, so that the layers between need not know. All ranks
    that share the sum ask for it at the same place of their work.
    """

    _take: Callable[[], Tensor]
    _taken: Tensor | None
    _norm: TakeAndNorm

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        take: Callable[[], Tensor],
        norm: TakeAndNorm,
    ) -> LaterSum:
        made: LaterSum = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._take, made._norm, made._taken = take, norm, None
        return made

    def taken(self) -> Tensor:
        """Return the sum. Blocks: as `ShardExchange.sum`, the first time."""
        if self._taken is None:
            self._taken = self._take()
        return self._taken

    def add_rms_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Do what the function of this name does with the sum. Blocks: as `taken`."""
        return self._norm(residual, weight, eps)

    def data_ptr(self) -> int:
        """Return the address of the sum, for a kernel that takes it."""
        return self.taken().data_ptr()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        given, named = tree_map_only(cls, cls.taken, (args, kwargs or {}))
        return func(*given, **named)
