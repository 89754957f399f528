"""Requests that a plain engine runs, in cohorts of equally many tokens.

They stay equally long, as each step adds a token to each. So a batch is never padded, and needs no
mask, whatever the network does with positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.stop_strings import StopStringMatcher
from spmd_rl.types.token_data import TokenData


@dataclass
class Running:
    """A request that runs, and what it drew since it began.

    It ends with a token of `stop_ids`, with a text that `matcher` finds, or at `max_length` tokens.
    """

    request: Request
    stop_ids: frozenset[int]
    matcher: StopStringMatcher | None
    max_length: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)

    @property
    def num_drawn(self) -> int:
        """The tokens of the answer, those of earlier runs included."""
        return len(self.request.past) + len(self.tokens)

    @property
    def context(self) -> NDArray[np.int32]:
        """All tokens, the prompt first."""
        drawn = np.array(self.tokens, np.int32)
        return np.concatenate([self.request.prompt, self.request.past.tokens, drawn])

    def add(self, version: int, token: int, logprob: float, kept: bytes) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.kept.append(kept)

    def is_stopped(self) -> bool:
        """Return whether the newest token ends the answer. It is asked once for each token."""
        found = self.matcher is not None and self.matcher.push(self.tokens[-1])
        return found or self.tokens[-1] in self.stop_ids

    def is_full(self) -> bool:
        return len(self.request.prompt) + self.num_drawn >= self.max_length

    def answered(self) -> Request:
        """Return the request that goes on from here."""
        drawn = TokenData(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            b"".join(self.kept),
        )
        return self.request.after(TokenData.join([self.request.past, drawn]))


@dataclass
class Cohort:
    """Requests of equally many tokens, and the cache of all but the newest; None for no cache."""

    rows: list[Running]
    cache: Any = None

    def inputs(self) -> NDArray[np.int64]:
        """Return the tokens that the cache does not have. Shape: [M, L]."""
        if self.cache is None:
            return np.stack([row.context for row in self.rows]).astype(np.int64)
        return np.array([row.tokens[-1:] for row in self.rows], np.int64)

    def keep(self, left: set[int]) -> None:
        """Go on with the rows of these identities alone."""
        places = [place for place, row in enumerate(self.rows) if id(row) in left]
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if places and hasattr(self.cache, "batch_select_indices"):
            self.cache.batch_select_indices(torch.tensor(places))
        else:
            self.cache = None
