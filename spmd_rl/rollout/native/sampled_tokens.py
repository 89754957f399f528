"""Sampled tokens of one engine step, on their way from the device to the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.vocab.kept_words import EncodedRows, read_rows


class SampledOnDevice(NamedTuple):
    """Outputs of a step, on the device or in host memory that it will write.

    `kept` is None where no row replays its filters. Shape: tokens [M] int64, logprobs [M] fp32.
    """

    tokens: Tensor
    logprobs: Tensor
    kept: EncodedRows | None = None


class SampledOnHost(NamedTuple):
    """Outputs of a step. `kept` has the encoded set of each token, or is empty without any.

    Shape: tokens and logprobs [M].
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    kept: list[bytes]


class SampledTokens:
    """Tokens, log-probs and kept sets of one step. The copy to the host begins at once."""

    def __init__(self, sampled: SampledOnDevice, device: torch.device) -> None:
        self._tokens = sampled.tokens.to("cpu", non_blocking=True)
        self._logprobs = sampled.logprobs.to("cpu", non_blocking=True)
        self._kept = None if sampled.kept is None else sampled.kept.to_host()
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> SampledOnHost:
        """Return what was sampled. Blocks: until the step has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        kept = [] if self._kept is None else read_rows(self._kept)
        return SampledOnHost(self._tokens.numpy(), self._logprobs.numpy(), kept)
