"""FSDP2 backend of a trainer, for what no other backend has."""

from __future__ import annotations

from spmd_rl.train.fsdp2.backend import Fsdp2
from spmd_rl.train.trainer import Trainer


def fsdp2(trainer: Trainer) -> Fsdp2:
    assert isinstance(trainer.backend, Fsdp2)
    return trainer.backend
