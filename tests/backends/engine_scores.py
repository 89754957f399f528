"""The native engine's log-probs of given tokens, as it decodes them: the oracle of equal bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import load_model
from spmd_rl.microscope.taps.points import Point
from spmd_rl.microscope.taps.taps import ValueTap
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.types.batch import Batch

CPU = torch.device("cpu")


def engine_scores(
    folder: Path,
    batch: Batch,
    dtype: torch.dtype,
    device: torch.device = CPU,
    row_shards: int = 1,
) -> Tensor:
    """Return the log-prob of each token of the mask, and 0 elsewhere. Shape: [T].

    The engine is that of one rank, and sums in `row_shards` parts.
    """
    case = case_of(batch)
    cfg = NativeEngineConfig(page_size=4, max_batch=16, max_step_tokens=40)
    engine = EnginePass(load_model(folder, dtype, device, row_shards=row_shards), cfg)
    tap = ValueTap(case.num_rows)
    engine.run(case, tap)
    tap.move_to_host()
    found = tap.table[Point(engine.model.spec.num_layers, "logprob")][:, 0]
    after = torch.cat([torch.zeros(1), found[:-1]])  # a row predicts the token after it
    return torch.where(torch.from_numpy(batch.mask), after, 0.0)


def case_of(batch: Batch) -> ReplayCase:
    """The sequences of a batch, whose responses are what its mask has."""
    parts = np.split(np.arange(batch.num_tokens), np.cumsum(batch.lengths)[:-1])
    return ReplayCase(
        tuple(
            ReplaySequence(
                f"{number}:0",
                prompt=batch.tokens[rows[~batch.mask[rows]]].astype(np.int64),
                response=batch.tokens[rows[batch.mask[rows]]].astype(np.int64),
                sampling=SamplingConfig(temperature=float(temperature)),
            )
            for number, (rows, temperature) in enumerate(zip(parts, batch.temperature, strict=True))
        )
    )
