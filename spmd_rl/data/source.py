"""Data source: where a recipe takes its prompts from, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from spmd_rl.types.prompts import Prompt


class DataSource(Protocol):
    """Hands out prompts, each under a `uid` of its own.

    The controller's main thread uses it, or the thread of a sampler, but never both at once. What
    `state` returns goes into the checkpoint, as plain data.
    """

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts: first those that were given back, in the order of their uids.

        A source that ends returns fewer, and an empty list at last.
        """
        ...

    def give_back(self, prompts: Sequence[Prompt]) -> None:
        """Have prompts taken again, from which nothing was learned."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue as if all that `state` had seen had been taken and given back here."""
        ...
