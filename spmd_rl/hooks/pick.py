"""Call of the user's function that weights the sources of a mixture, in the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spmd_rl.errors import SpmdError
from spmd_rl.hooks.results import problem_of
from spmd_rl.hooks.signatures import load_pick_sources


def pick_of(name: str) -> Callable[[int, list[str]], Mapping[str, float]]:
    """Return a function that calls `hooks.pick_sources` of this name.

    It raises a SpmdError with function, step and line for whatever the function raises.
    Raises: ConfigError when there is no such function, also for its signature.
    """
    function = load_pick_sources(name)

    def pick(step: int, sources: list[str]) -> Mapping[str, float]:
        try:
            return function(step, sources)
        except SpmdError:
            raise
        except Exception as error:  # a user's function may raise anything
            problem = problem_of(error, function)
            raise SpmdError(f"hooks.pick_sources {name}, for step {step + 1}: {problem}") from error

    return pick
