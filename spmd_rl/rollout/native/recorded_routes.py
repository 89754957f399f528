"""Recorded routes of the tokens in the cache: what a prompt's tokens have, whoever computed them.

Steps give the routes of the tokens that they computed, in the order in which they were launched. A
drawn token keeps those of the step that drew it. A prompt may be in pages that other requests
filled, so the routes of all tokens are kept by their slots in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.rollout.native.step_plan import StepPlan
from spmd_rl.types.routes import RouteIds


class RecordedRoutes:
    """The routes of the tokens in a cache of `num_pages`, in host memory."""

    def __init__(self, shape: RouteShape, num_pages: int, page_size: int) -> None:
        self.dtype: torch.dtype = getattr(torch, shape.dtype.name)
        self._page_size = page_size
        # the system gives memory as pages are written
        self._of_pages = np.zeros((num_pages, page_size, shape.width), shape.dtype)

    def write(self, slots: NDArray[np.int64], routes: RouteIds) -> None:
        """Write the routes of the tokens at these slots. Shape: [T], [T, W]."""
        self._of_pages.reshape(-1, routes.shape[1])[slots] = routes

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy pages, each pair from its source to its target."""
        for source, target in pages:
            self._of_pages[target] = self._of_pages[source]

    def note_prompts(self, table: SequenceTable, rows: NDArray[np.int64]) -> None:
        """Give rows that drew their first token the routes of their prompts, if they ask for them.

        Their first token's are zeros: nothing predicts it. The last one's are a drawn token's.
        """
        found: dict[int, bytes] = {}  # samples of one prompt have one array of it
        for row in rows[table.host_length(rows) == table.prompt_length[rows]].tolist():
            request = table.requests[row]
            if request is None or not request.sampling.replay_routes:
                continue
            if id(request.prompt) not in found:
                found[id(request.prompt)] = self._of_prompt(table, row, len(request.prompt))
            table.prompt_routes[row] = found[id(request.prompt)]

    def _of_prompt(self, table: SequenceTable, row: int, num_tokens: int) -> bytes:
        pages = self._of_pages[table.pages[row, : -(-num_tokens // self._page_size)]]
        rows = pages.reshape(-1, pages.shape[-1])
        return np.concatenate([np.zeros_like(rows[:1]), rows[: num_tokens - 1]]).tobytes()


@dataclass(frozen=True)
class RoutedStep:
    """Routes of the tokens that a step computed, and where they are kept.

    `sampled` are the entries from which tokens are drawn.
    Shape: `routes` [T', W] with T' >= T; `slots` [T]; `sampled` [M].
    """

    store: RecordedRoutes
    plan: StepPlan
    routes: Tensor
    slots: NDArray[np.int64]
    sampled: NDArray[np.int64]

    def to_host(self) -> RoutedStep:
        """Return the step with its routes in host memory, to which a copy is queued."""
        return replace(self, routes=self.routes.to("cpu", non_blocking=True))

    def write(self) -> RouteIds:
        """Write the routes of the step, which has run, to where they are kept.

        Returns those of the rows that tokens were drawn from. Shape: [M, W].
        """
        routes: RouteIds = self.routes.numpy()
        self.store.copy(self.plan.copies_before)
        self.store.write(self.slots, routes[: len(self.slots)])
        self.store.copy(self.plan.copies_after)
        return routes[self.sampled]
