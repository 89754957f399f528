"""Memory of a native engine: the slab of its weights, and the slab of its KV pages.

Recorded graphs read and write these addresses, which stay the same over a sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from spmd_rl.errors import ResidencyError
from spmd_rl.offload.residency import Receipt
from spmd_rl.offload.role_memory import RoleMemory

WEIGHTS, KV = "weights", "kv"  # the tags


class EngineMemory:
    """What an engine asks of the regions of its role."""

    def __init__(self, memory: RoleMemory) -> None:
        self._memory = memory
        self._pages: Tensor | None = None

    @property
    def is_awake(self) -> bool:
        """Whether the engine can generate, as far as memory goes."""
        return self.has_pages and self._memory.is_awake(WEIGHTS)

    @property
    def has_pages(self) -> bool:
        return self._memory.is_awake(KV)

    @property
    def lost_weights(self) -> bool:
        """Whether the weights sleep, and only a push brings them back."""
        return self._memory.is_lost(WEIGHTS)

    def allocate_pages(self, num_bytes: int) -> Tensor:
        """Return the memory of the pages, zero. Raises: ResidencyError if too little is left."""
        with _advice():
            self._pages = self._memory.slab(KV, "drop", num_bytes).bytes
        if self._pages.is_cuda:
            self.clear_pages()
        return self._pages

    def clear_pages(self) -> None:
        """Write zeros: unset pages may hold NaN, which would outlive their tokens."""
        if self._pages is not None:
            self._pages.zero_()

    def sleep(self, tags: tuple[str, ...]) -> list[Receipt]:
        return self._memory.sleep(tags)

    def wake(self, tags: tuple[str, ...]) -> list[Receipt]:
        """Take memory again, and clear the pages of a GPU if they were given back. Those of a CPU
        are zero, or as they were (offload/host.py).
        """
        had_pages = self.has_pages
        with _advice():
            receipts = self._memory.wake(tags)
        if self.has_pages and not had_pages and self._pages is not None and self._pages.is_cuda:
            self.clear_pages()
        return receipts

    def begin_push(self, changes_slab: bool) -> None:
        """Note that weights change, and perhaps those in the slab.

        Raises: ResidencyError while they sleep.
        """
        self._memory.require("a push", WEIGHTS)
        if changes_slab:
            self._memory.note_change(WEIGHTS)


@contextmanager
def _advice() -> Iterator[None]:
    """Have an error of too little memory say which settings ask for less."""
    try:
        yield
    except ResidencyError as error:
        advice = "a lower engine.num_pages or engine.memory_fraction asks for less"
        raise ResidencyError(f"no room for pages of keys and values: {error}; {advice}") from error
