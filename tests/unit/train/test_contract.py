"""Trainer and engine of one model, on one machine, follow one numeric contract."""

from __future__ import annotations

import torch

from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine


def test_both_roles_agree(new_trainer) -> None:
    trainer = new_trainer()
    model = trainer.backend.scorer.model
    same, other = (
        NativeEngine(model, NativeEngineConfig(dtype=dtype), torch.device("cpu"))
        for dtype in ("float32", "bfloat16")
    )
    assert trainer.numeric_contract() == same.contract()
    assert trainer.numeric_contract() != other.contract()
