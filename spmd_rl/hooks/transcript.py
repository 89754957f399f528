"""Transcript of an episode: what the engine drew, and what the episode observed, after a prompt."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """What one engine call drew: `status` is "completed" after a stop, "truncated" at a limit.

    Shape: `tokens`, `logprobs`, `versions` are [T].
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    text: str
    status: Literal["completed", "truncated"]
    kept: bytes = b""
