"""Where training stands."""

from __future__ import annotations

import msgspec


class TrainerState(msgspec.Struct, forbid_unknown_fields=True):
    """The weights' version, and the optimizer steps taken (the schedule's clock)."""

    version: int = 0
    optimizer_steps: int = 0
