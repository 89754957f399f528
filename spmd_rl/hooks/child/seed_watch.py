"""Seed watch: a hook that seeds the shared random numbers does so for its own call alone.

A later call would otherwise draw what an earlier one has fixed. Seeds that hooks set while they are
imported stand until the first call that sets one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np


class SeedWatch:
    """Knows whether `random` or `numpy.random` was seeded. Make it before hooks are imported."""

    def __init__(self) -> None:
        self._was_seeded = False
        # without an argument, they seed from the system
        self._fresh_seeds: list[Callable[[], None]] = [random.seed, np.random.seed]
        for module in (random, np.random):
            for name in ("seed", "setstate", "set_state"):
                if hasattr(module, name):
                    setattr(module, name, self._noted(getattr(module, name)))

    def start(self) -> None:
        """Forget what was seeded so far."""
        self._was_seeded = False

    def restore(self) -> None:
        """Give later calls other random numbers, if this one has seeded them."""
        if self._was_seeded:
            for seed in self._fresh_seeds:
                seed()
            self._was_seeded = False

    def _noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._was_seeded = True
            return function(*args, **kwargs)

        return noted
