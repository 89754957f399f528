"""Base class of attention among the tokens of one forward pass, as the network calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from spmd_rl.kernels.rowwise.rope import qk_norm_rope
from spmd_rl.kernels.rowwise.rope_inputs import QkNorm, Rotary


class TokenAttention(ABC):
    """Attention in one forward pass: it knows which tokens see which.

    Shape: q [T', H, D], k and v [T', K, D]; T' may be the number of tokens padded to the row tile.
    Returns [T', H, D].
    """

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with queries and keys that are normed and rotated already."""

    def rotate_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norm: QkNorm, rotary: Rotary
    ) -> Tensor:
        """Norm and rotate queries and keys as they were projected, then attend."""
        q, k = qk_norm_rope(q, k, norm, rotary)
        return self(layer, q, k, v)
