"""Cases of score_ranks.py, and how they are launched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.dist.torchrun import torchrun


@dataclass(frozen=True)
class ScoreCase:
    """A trainer that scores. Without `backend` it is FSDP2's; `plant` names a wrong op.

    The models of its run sum in `row_shards` parts, or in as many as ranks share the trainer's.
    """

    model: str
    split: dict[str, int] = field(default_factory=dict)
    backend: dict[str, Any] | None = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    plant: str | None = None
    row_shards: int = 1


@dataclass(frozen=True)
class Scored:
    """Log-probs of a whole batch [T], 0 outside of its mask, and the trainer's contract."""

    scores: Tensor
    contract: dict[str, str | int]


def score_on(
    num_ranks: int, cases: Mapping[str, ScoreCase], work: Path, **sizes: int
) -> dict[str, Scored]:
    """Return what the trainers find of the batch of these sizes."""
    work.mkdir(parents=True, exist_ok=True)
    path, out = work / "cases.json", work / "out.json"
    asked = {"batch": sizes, "cases": {name: asdict(case) for name, case in cases.items()}}
    path.write_text(json.dumps(asked))
    found = torchrun("score_ranks.py", num_ranks, out, str(path), str(out), room="backends")
    return {
        name: Scored(torch.tensor(one["scores"]), one["contract"]) for name, one in found.items()
    }
