"""Base class of attention among the tokens of one forward pass, as the network calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from spmd_rl.kernels.delta.states import SequenceStates
from spmd_rl.kernels.rowwise.rope import qk_norm_rope
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary
from spmd_rl.kernels.unproven import refuse_unproven


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
    """Call an attention kernel, with a reach if it is not whole.

    Raises: ConfigError for windows and sinks on GPUs, as long as none has run their kernels.
    """
    if reach.is_whole:
        return kernel(q, keys, values)
    if q.device.type != "cpu":
        refuse_unproven("attention in windows or with sinks")
    return kernel(q, keys, values, reach)


class TokenAttention(ABC):
    """Attention in one forward pass: it knows which tokens see which.

    Shape: q [T', H, D], k [T', K, D], v [T', K, V]; T' may be the number of tokens padded to the
    row tile. Returns [T', H, V]. V is D, or less where values are the last elements of keys.
    """

    @abstractmethod
    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, reach: Reach = WHOLE
    ) -> Tensor:
        """Attend with queries and keys that are normed and rotated already."""

    @abstractmethod
    def history(self, layer: int, *rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        """Keep `rows` of the new tokens, then yield what each sequence has of them so far.

        It is for layers that keep other arrays than keys and values (`LayerPages`). Each sequence
        gives the range of its new tokens, and all its rows, the new ones last. Tokens of which
        nothing is kept are padding, and in no range.
        Shape: each of rows [T', ...]; yields [S, ...] each.
        """

    @abstractmethod
    def sequences(self, layer: int) -> Iterator[tuple[slice | Tensor, SequenceStates]]:
        """Yield sequences of the pass with their states, those that others continue first.

        It is for layers that hand on a state. The first of a pair says which rows of the pass their
        new tokens are, laid end to end. Rows that none names are padding.
        """

    def rotate_and_attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm: QkNorm,
        rotary: Rotary,
        reach: Reach = WHOLE,
    ) -> Tensor:
        """Norm and rotate queries and keys as they were projected, then attend."""
        q, k = qk_norm_rope(q, k, norm, rotary)
        return self(layer, q, k, v, reach=reach)
