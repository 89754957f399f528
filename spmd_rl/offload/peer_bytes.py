"""Memory of a rank that all GPUs of its host map, as an engine's ranks allocate it. No torch.

It never sleeps: its addresses are known to all ranks.

Units: bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

ALIGN_BYTES = 256
EXCHANGE_BYTES = 2 * (8 << 20)  # of two buffers, for the sums of ranks that share a model
ID_BYTES, WEIGHT_BYTES = 8, 4


class GatheredRow(NamedTuple):
    """A row that goes to `num_chosen` experts of other ranks."""

    hidden_size: int
    num_chosen: int
    item_bytes: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The bytes of the row, of the ids and weights of its experts, and of what they give it."""
        row, chosen = self.hidden_size * self.item_bytes, self.num_chosen
        return row, chosen * ID_BYTES, chosen * WEIGHT_BYTES, chosen * row


def gather_bytes(row: GatheredRow, num_rows: int) -> list[int]:
    """Return the bytes of each part of so many rows, those of all ranks, aligned."""
    return [math.ceil(num_rows * one / ALIGN_BYTES) * ALIGN_BYTES for one in row.parts]
