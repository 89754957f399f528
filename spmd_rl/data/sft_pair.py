"""Sequence of supervised training: tokens, and which of them are learned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SftPair(NamedTuple):
    """One sequence to imitate. `mask` is true on answers and their end-of-text tokens.

    Shape: both are [T].
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens before the last answer."""
        not_learned = np.flatnonzero(~self.mask)
        return int(not_learned[-1]) + 1 if len(not_learned) else 0
