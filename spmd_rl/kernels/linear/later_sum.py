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
    that share the sum ask for it at the same place of their work. What the sum is made of is kept
    until then, and no longer.
    """

    _taken: Tensor | None
    _ways: tuple[Callable[[], Tensor], TakeAndNorm] | None

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        take: Callable[[], Tensor],
        norm: TakeAndNorm,
    ) -> LaterSum:
        made: LaterSum = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._ways, made._taken = (take, norm), None
        return made

    @property
    def is_taken(self) -> bool:
        """Whether the sum has been asked for as a tensor, which may have been changed since."""
        return self._taken is not None

    def taken(self) -> Tensor:
        """Return the sum. Blocks: as `ShardExchange.sum`, the first time.

        Raises: RuntimeError after `add_rms_norm`.
        """
        if self._taken is None:
            self._taken = self._use()[0]()
        return self._taken

    def add_rms_norm(self, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Do what the function of this name does with a sum that nobody has taken.

        Blocks: as `taken`. Raises: RuntimeError where somebody has.
        """
        return self._use()[1](residual, weight, eps)

    def _use(self) -> tuple[Callable[[], Tensor], TakeAndNorm]:
        if self._ways is None:
            raise RuntimeError("a sum over ranks was taken before: a norm keeps no copy of it")
        ways, self._ways = self._ways, None
        return ways

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
