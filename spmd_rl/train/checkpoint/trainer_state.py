"""State of a trainer besides its weights and moments, as a checkpoint keeps it."""

from __future__ import annotations

import msgspec


class TrainerState(msgspec.Struct, forbid_unknown_fields=True):
    """The version of the weights, and the optimizer steps taken.

    The schedule counts `steps_before` more, which a run that begins at a later step left out.
    """

    version: int = 0
    optimizer_steps: int = 0
    steps_before: int = 0
