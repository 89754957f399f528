"""State of a trainer besides its weights and moments, as a checkpoint keeps it."""

from __future__ import annotations

import msgspec


class TrainerState(msgspec.Struct, forbid_unknown_fields=True):
    """The version of the weights, and the optimizer steps taken, which the schedule counts."""

    version: int = 0
    optimizer_steps: int = 0
