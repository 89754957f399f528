"""HostStack: host memory for tensors that come and go together, kept between uses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Reserve = Callable[[int], Tensor]  # bytes of host memory, pinned on a GPU, as a uint8 tensor
BLOCK_BYTES = 256 << 20
ALIGNMENT = 256


class HostStack:
    """Blocks of host memory that `reserve` returns, never given back. `take` goes through them in
    order, and `clear` begins anew. So memory is reserved only when more is taken than ever before.
    """

    def __init__(self, reserve: Reserve, block_bytes: int = BLOCK_BYTES) -> None:
        self._reserve = reserve
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._block, self._offset = 0, 0

    def take(self, num_bytes: int) -> Tensor:
        """Return memory that nobody else has until `clear`. Raises: as `reserve`."""
        while self._block < len(self._blocks):
            block = self._blocks[self._block]
            if self._offset + num_bytes <= len(block):
                taken = block[self._offset : self._offset + num_bytes]
                self._offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
                return taken
            self._block, self._offset = self._block + 1, 0
        self._blocks.append(self._reserve(max(num_bytes, self._block_bytes)))
        return self.take(num_bytes)

    def clear(self) -> None:
        """Take all memory back."""
        self._block, self._offset = 0, 0

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._blocks))
