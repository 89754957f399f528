"""Budgets of an engine's steps: tokens, and time for prompts where decoding steps wait for it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from spmd_rl.rollout.native.prefill_cost import PrefillCost, StepWork

NO_COST = PrefillCost()


class StepBudget:
    """What one step may compute: `num_tokens` tokens, and chunks of prompts for `most_s` seconds.

    `work` is that of the chunks so far. The first chunk may have `least_tokens` in any case. A
    chunk that the time ends is a multiple of the tokens that fill the GPU.
    """

    def __init__(
        self,
        num_tokens: int,
        cost: PrefillCost = NO_COST,
        most_s: float = math.inf,
        least_tokens: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self.work = StepWork()
        self._cost = cost
        self._most_s = most_s
        self._least_tokens = least_tokens

    def take(self, start: int, missing: int) -> int:
        """Spend the budget on tokens behind `start` others; return how many of `missing` it covers.

        Nothing is left once a row gets less than it misses.
        """
        chunk = self._largest_chunk(start, min(missing, self.num_tokens))
        if chunk:
            self.work = self._cost.add(self.work, start, chunk)
        self.num_tokens = self.num_tokens - chunk if chunk == missing else 0
        self._least_tokens = 0
        return chunk

    def _largest_chunk(self, start: int, most: int) -> int:
        wave = self._cost.wave_tokens
        smaller = range((most - 1) // wave * wave, 0, -wave)
        fitting = (length for length in (most, *smaller) if self._fits(start, length))
        return next(fitting, min(self._least_tokens, most))

    def _fits(self, start: int, num_tokens: int) -> bool:
        return self._cost.add(self.work, start, num_tokens).seconds <= self._most_s


class PrefillBound:
    """Bounds the work on prompts between two decoding steps to `most_s` seconds, as estimated.

    Where nobody decodes, steps are bounded by tokens alone. Prompts always go on: between two
    decoding steps, one chunk may fill the GPU, however long that takes.
    """

    def __init__(self, cost: PrefillCost = NO_COST, most_s: float = math.inf) -> None:
        self._cost = cost
        self._most_s = most_s
        self._done_s = 0.0  # since the last decoding step

    def budget(self, num_tokens: int, *, holds_up_decoding: bool) -> StepBudget:
        """Return the budget of a step of prompts, of at most `num_tokens`.

        It is empty if half of the time has passed since the last decoding step, because short steps
        use a GPU badly.
        """
        if not holds_up_decoding:
            self._done_s = 0.0
            return StepBudget(num_tokens)
        if self._done_s > self._most_s / 2:
            return StepBudget(0)
        least_tokens = 0 if self._done_s else self._cost.wave_tokens
        return StepBudget(num_tokens, self._cost, self._most_s - self._done_s, least_tokens)

    def add_prefill(self, spent: StepBudget) -> None:
        """Count a step of prompts."""
        self._done_s += spent.work.seconds

    def add_decoding(self) -> None:
        """Count a decoding step."""
        self._done_s = 0.0


def share_budget(
    starts: NDArray[np.int64], missing: NDArray[np.int64], budget: StepBudget
) -> NDArray[np.int64]:
    """Return how many of each row's `missing` tokens, behind `starts` others, `budget` covers.

    Rows that miss one token go first, then the others in order.
    Shape: `starts` and `missing` [B], at least 1 missing each; the budget has a token for each row
    that misses one; returns [B].
    """
    lengths = (missing == 1).astype(np.int64)
    budget.num_tokens -= int(lengths.sum())
    for row in np.flatnonzero(missing > 1).tolist():
        lengths[row] = budget.take(int(starts[row]), int(missing[row]))
    return lengths
