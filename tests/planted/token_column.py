"""A planted per-token column: int16 x 8 a token, which the native engine returns with each draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from spmd_rl.rollout.native import model_runner
from spmd_rl.rollout.native.sampled_tokens import SampledOnDevice

NAME, WIDTH = "planted", 8


def values_of(tokens: NDArray[np.integer]) -> NDArray[np.int16]:
    """Return what the column has of drawn tokens. Shape: [R] to [R, 8]."""
    return (tokens[:, None].astype(np.int64) * 31 + np.arange(WIDTH) + 1).astype(np.int16)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine return the column: this is its one declaration."""

    def sampled(tokens: torch.Tensor, *rest: Any) -> SampledOnDevice:
        made = SampledOnDevice(tokens, *rest)
        column = torch.from_numpy(values_of(tokens.numpy()))
        return made._replace(columns={**made.columns, NAME: column})

    monkeypatch.setattr(model_runner, "SampledOnDevice", sampled)
