"""MomentStream: moments in host memory that pass through a GPU, a chunk at a time.

    host -> slot      on one copy stream, as soon as the slot is free
    update            on the current stream
    slot -> host      on another copy stream

Of three slots, one is read from the host, one is updated and one is written back. So both
directions of the bus are busy at once, and the update is hidden behind the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from spmd_rl.train.optimizer.moment_chunks import NUM_SLOTS, Chunk

Update = Callable[[Chunk, Sequence[Tensor]], None]


class MomentStream:
    """Passes flat host tensors of equal length through `device`. On the CPU it copies as well.

    One thread calls it. The host tensors may be read after `wait`.
    """

    def __init__(self, host: Sequence[Tensor], device: torch.device) -> None:
        self._host = host
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._to_device, self._to_host = (self._module.Stream() for _ in range(2))

    def run(self, chunks: Sequence[Chunk], update: Update) -> None:
        """Have `update` change each chunk: it gets the chunk, and its tensors on the device.

        Blocks: not on the GPU, whose current stream has the last copy to the host before it.
        """
        count = max((chunk.count for chunk in chunks), default=0)
        slots = [self._slot(count) for _ in range(min(NUM_SLOTS, len(chunks)))]
        current = self._module.current_stream()
        self._to_device.wait_stream(current)  # the slots' memory may still be read
        for number, chunk in enumerate(chunks):
            slot = [one[: chunk.count] for one in slots[number % NUM_SLOTS].tensors]
            slots[number % NUM_SLOTS].is_free.wait(self._to_device)
            with self._module.stream(self._to_device):
                self._copy(slot, self._ranges(chunk))
            current.wait_stream(self._to_device)
            update(chunk, slot)
            self._to_host.wait_stream(current)
            with self._module.stream(self._to_host):
                self._copy(self._ranges(chunk), slot)
                slots[number % NUM_SLOTS].is_free.record(self._to_host)
        current.wait_stream(self._to_host)

    def wait(self) -> None:
        """Block until the host tensors are as the last `run` left them."""
        self._module.synchronize(self._device)

    def _slot(self, count: int) -> _Slot:
        tensors = [one.new_empty(count, device=self._device) for one in self._host]
        return _Slot(tensors, self._module.Event())

    def _ranges(self, chunk: Chunk) -> list[Tensor]:
        return [one[chunk.start : chunk.start + chunk.count] for one in self._host]

    @staticmethod
    def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)


class _Slot:
    """Memory of one chunk on the device, and the event of its last copy to the host."""

    def __init__(self, tensors: list[Tensor], is_free: Any) -> None:
        self.tensors = tensors
        self.is_free = is_free
