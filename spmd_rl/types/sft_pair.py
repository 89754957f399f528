"""Sequence of supervised training: tokens, and which of them are learned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class SftPair(NamedTuple):
    """One sequence to imitate. `mask` is true on answers and their end-of-text tokens.

    `source` names the data file, for metrics by source.
    Shape: `tokens` and `mask` are [T].
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    source: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens before the last answer."""
        not_learned = np.flatnonzero(~self.mask)
        return int(not_learned[-1]) + 1 if len(not_learned) else 0

    def encoded(self) -> bytes:
        """Return tokens and mask as bytes, each behind its length."""
        return b"".join(
            array.size.to_bytes(8, "little") + array.tobytes() for array in (self.tokens, self.mask)
        )
