"""Requests that a plain engine runs, in cohorts of equally many tokens.

They stay equally long, as each step adds a token to each. So a batch is never padded, and needs no
mask, whatever the network does with positions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.stop_strings import StopStringMatcher
from spmd_rl.types.token_data import TokenData


@dataclass(eq=False)
class Running:
    """A request that runs, with its answer so far. `matcher` has read all tokens but the newest."""

    request: Request
    matcher: StopStringMatcher | None

    def add(self, version: int, token: int, logprob: float, kept: bytes) -> None:
        """Add a token to the answer."""
        drawn = TokenData(
            np.array([token], np.int32),
            np.array([logprob], np.float32),
            np.array([version], np.int32),
            kept,
        )
        self.request = self.request.after(TokenData.join([self.request.past, drawn]))

    def is_stopped(self, eos_ids: Container[int]) -> bool:
        """Return whether the newest token ends the answer. It is asked once for each token."""
        token, sampling = int(self.request.past.tokens[-1]), self.request.sampling
        found = self.matcher is not None and self.matcher.push(token)
        is_end = token in eos_ids and not sampling.ignore_eos
        return found or is_end or token in sampling.stop_ids

    def is_full(self, most_tokens: int) -> bool:
        """Return whether the answer has all its tokens, in a context of `most_tokens`."""
        request = self.request
        return request.num_tokens >= min(
            len(request.prompt) + request.sampling.max_tokens, most_tokens
        )


@dataclass
class Cohort:
    """Requests of equally many tokens, and the cache of all but the newest; None for no cache."""

    rows: list[Running]
    cache: Any = None

    def inputs(self) -> NDArray[np.int64]:
        """Return the tokens that the cache does not have. Shape: [M, L]."""
        first = 0 if self.cache is None else -1
        requests = [row.request for row in self.rows]
        whole = [np.concatenate([one.prompt, one.past.tokens])[first:] for one in requests]
        return np.stack(whole).astype(np.int64)

    def keep(self, left: Container[Running]) -> None:
        """Go on with these rows alone."""
        places = [place for place, row in enumerate(self.rows) if row in left]
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if places and hasattr(self.cache, "batch_select_indices"):
            self.cache.batch_select_indices(torch.tensor(places))
        else:
            self.cache = None
