"""PeakMeter: the most GPU memory that was in use at once, where memory of torch's sleeps and wakes.

torch's allocator counts memory as allocated while it sleeps. So the peak is read before each sleep
and each wake, less what sleeps then.
"""

from __future__ import annotations

import torch

from spmd_rl.offload.region import TorchRegion


class PeakMeter:
    """Follows every region of this process that is made after it. There is one in a process."""

    def __init__(self) -> None:
        self._asleep: dict[TorchRegion, int] = {}  # and the bytes that torch has allocated in it
        self._peak_bytes = 0
        unmap, map_again = TorchRegion.unmap, TorchRegion.map

        def unmapping(region: TorchRegion) -> None:
            self._note_peak()
            allocated = sum(piece.numel() for piece in region.pieces())
            unmap(region)
            self._asleep[region] = allocated

        def mapping(region: TorchRegion) -> None:
            self._note_peak()
            map_again(region)
            del self._asleep[region]

        TorchRegion.unmap, TorchRegion.map = unmapping, mapping  # type: ignore[method-assign]

    def read(self) -> tuple[int, int]:
        """Return the bytes in use outside torch's allocator, and its peak since the last call."""
        torch.cuda.synchronize()
        self._note_peak()
        peak, self._peak_bytes = self._peak_bytes, 0
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved() - sum(one.num_bytes for one in self._asleep)
        return total - free - reserved, peak

    def _note_peak(self) -> None:
        asleep = sum(self._asleep.values())
        self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated() - asleep)
        torch.cuda.reset_peak_memory_stats()
