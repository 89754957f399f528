"""Branches of a session: which of them become samples, so that the policy learns from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.gateway.turns import DrawnTurn, samples_of
from spmd_rl.hooks.failures import EpisodeFailure
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

ALL, MAIN = "all", "main"
Decode = Callable[[NDArray[np.int32]], str]


class Branches:
    """Chooses what is learned of an episode: `ALL`, `MAIN`, or what a function says of a sample.

    The main branch is the conversation that led to the last reply, in all contexts that it had
    because a template rewrote it. What is not chosen is left out, and claims no turn.
    """

    def __init__(self, learn: str | Callable[[Sample], Any] = ALL) -> None:
        self._learn = learn

    def samples(self, prompt: Prompt, turns: Sequence[DrawnTurn], decode: Decode) -> list[Sample]:
        """Return the samples that are learned from. Raises: EpisodeFailure for a wrong function."""
        ends = leaves_of(turns)
        if self._learn == MAIN:
            ends = main_ends(turns)
        elif not isinstance(self._learn, str):
            ends = [end for end in ends if self._chosen(prompt, end, decode)]
        return samples_of(prompt, ends, decode)

    def _chosen(self, prompt: Prompt, end: DrawnTurn, decode: Decode) -> bool:
        """Ask the user's function about a branch with all its turns."""
        assert not isinstance(self._learn, str)
        (sample,) = samples_of(prompt, [end], decode)
        try:
            chosen = self._learn(sample)
        # a user's function may raise anything
        except Exception as error:
            problem = f"agent.learn raised {type(error).__name__}: {error}"
            raise EpisodeFailure("agent", problem) from error
        if not isinstance(chosen, (bool, np.bool_)):
            problem = f"agent.learn returned {chosen!r}"[:400]
            raise EpisodeFailure("agent", f"{problem}: expected True or False")
        return bool(chosen)


def leaves_of(turns: Sequence[DrawnTurn]) -> list[DrawnTurn]:
    """Return the turns after which nothing was drawn, in the order in which they were drawn."""
    inner = {id(one.before) for one in turns if one.before is not None}
    return [one for one in turns if id(one) not in inner]


def main_ends(turns: Sequence[DrawnTurn]) -> list[DrawnTurn]:
    """Return the last turn, and before it the end of each context that led to it."""
    ends: list[DrawnTurn] = []
    end = turns[-1] if turns else None
    while end is not None:
        ends.append(end)
        end = end.chain()[0].after
    return ends[::-1]
