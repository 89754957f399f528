"""Sampled tokens of one engine step, on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels.vocab.kept_words import EncodedRows, read_rows
from spmd_rl.rollout.native.recorded_routes import RoutedStep
from spmd_rl.types.routes import EXPERT_IDS

NO_COLUMNS: Mapping[str, Tensor] = {}


class SampledOnDevice(NamedTuple):
    """Outputs of a step, on the device or in host memory that it will write.

    `kept` is None where no row replays its filters. `columns` are further values of each token, by
    name. `routes` are those of a decoding step that records them.
    Shape: tokens [M] int64, logprobs [M] fp32; columns [M] or [M, K]; routes [M, W].
    """

    tokens: Tensor
    logprobs: Tensor
    kept: EncodedRows | None = None
    columns: Mapping[str, Tensor] = NO_COLUMNS
    routes: Tensor | None = None


class SampledOnHost(NamedTuple):
    """Outputs of a step. `kept` has the encoded set of each token, or is empty without any.

    Shape: tokens and logprobs [M]; columns [M] or [M, K].
    """

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    kept: list[bytes]
    columns: dict[str, NDArray[Any]]

    def select(self, chosen: NDArray[np.bool_]) -> SampledOnHost:
        """Return the rows that are chosen. Shape: [M]."""
        return SampledOnHost(
            self.tokens[chosen],
            self.logprobs[chosen],
            list(compress(self.kept, chosen.tolist())),
            {name: values[chosen] for name, values in self.columns.items()},
        )


class SampledTokens:
    """What one step sampled, and the routes that it recorded. The copy to the host begins at once.

    `wait` or `drop` is called in the order of the steps.
    """

    def __init__(
        self, sampled: SampledOnDevice, device: torch.device, routed: RoutedStep | None = None
    ) -> None:
        self._routed = None if routed is None else routed.to_host()
        self._tokens = sampled.tokens.to("cpu", non_blocking=True)
        self._logprobs = sampled.logprobs.to("cpu", non_blocking=True)
        self._kept = None if sampled.kept is None else sampled.kept.to_host()
        self._columns = {
            name: values.to("cpu", non_blocking=True) for name, values in sampled.columns.items()
        }
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> SampledOnHost:
        """Return what was sampled. Blocks: until the step has run."""
        if self._arrived is not None:
            self._arrived.synchronize()
        kept = [] if self._kept is None else read_rows(self._kept)
        columns = {name: values.numpy() for name, values in self._columns.items()}
        if self._routed is not None:
            columns[EXPERT_IDS] = self._routed.write()
        return SampledOnHost(self._tokens.numpy(), self._logprobs.numpy(), kept, columns)

    def drop(self) -> None:
        """Forget what was sampled, but for the routes: pages of ended sequences may be used again.

        Blocks: until the step has run, if routes are recorded.
        """
        if self._routed is not None:
            self.wait()
