"""How far the queries of a layer of attention see, and what else is in their denominators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from spmd_rl.errors import ConfigError


class Reach(NamedTuple):
    """A query sees the last `window` keys up to its own; 0 stands for all of them.

    With `sinks` [H], each head's softmax has one more logit, which has no value. So the weights of
    keys add up to less than one.
    """

    window: int = 0
    sinks: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all keys are seen, and nothing else."""
        return self.window == 0 and self.sinks is None


WHOLE = Reach()


def attend(
    kernel: Callable[..., Tensor], q: Tensor, keys: Tensor, values: Tensor, reach: Reach
) -> Tensor:
    """Call an attention kernel; only those of CPUs take a reach.

    Raises: ConfigError for windows and sinks on a GPU.
    """
    if reach.is_whole:
        return kernel(q, keys, values)
    if q.device.type != "cpu":
        raise ConfigError("attention in windows or with sinks has no kernel on GPUs yet")
    return kernel(q, keys, values, reach)
