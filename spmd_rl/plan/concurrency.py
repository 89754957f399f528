"""How many sequences an engine has running at once, and how long they are, from a recipe's config.

The decision what sleeps asks whether their keys and values fit beside all else. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.rollout.kinds import EngineConfig

ANY_PROMPT_TOKENS = 1024  # assumed of a prompt where prompts.max_prompt_tokens sets no limit


@dataclass(frozen=True)
class RunningSequences:
    """Sequences that one engine has running at once, and the tokens of each at its end."""

    num_sequences: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_sequences:,} sequences of {self.num_tokens:,} tokens"


@dataclass(frozen=True)
class Queue:
    """Sequences that a step asks of one engine, those that may run at once, and how many of them
    its pages hold.
    """

    num_asked: int
    running: RunningSequences
    num_held: int

    @property
    def num_at_once(self) -> int:
        """Sequences that run at once; at least one, whose pages are always there."""
        return max(1, min(self.num_held, self.running.num_sequences))

    @property
    def num_waiting(self) -> int:
        return self.num_asked - self.num_at_once

    @property
    def num_waves(self) -> int:
        """How many times as many sequences as run at once decode, one set after the other."""
        return -(-self.num_asked // self.num_at_once)

    @property
    def lacks_pages(self) -> bool:
        """Whether the pages hold fewer sequences than may run at once."""
        return self.num_held < self.running.num_sequences

    def __str__(self) -> str:
        asked, tokens = self.num_asked, self.running.num_tokens
        limit = "its pages hold" if self.lacks_pages else "engine.max_batch lets run"
        return (
            f"{self.num_waiting:,} of the {asked:,} sequences that a step asks of an engine wait: "
            f"{limit} {self.num_at_once:,} at once, of {tokens:,} tokens each, so they take "
            f"{self.num_waves:,} waves"
        )


def running(
    needs: RunNeeds, engine: EngineConfig, engines: Placement, spec: ModelSpec
) -> RunningSequences:
    """Return what each engine has running: a step's samples, spread over the engines.

    It is `engine.max_batch` at most, and that too where the config does not say how many prompts a
    step has.
    """
    num_tokens = min(longest_sequence(needs) or spec.max_positions, spec.max_positions)
    return RunningSequences(min(num_asked(needs, engine, engines), engine.max_batch), num_tokens)


def num_asked(needs: RunNeeds, engine: EngineConfig, engines: Placement) -> int:
    """Return how many sequences a step asks of each engine."""
    num_engines = engines.data_size
    num_samples = 1 if needs.sampling is None else needs.sampling.num_samples
    asked = needs.prompts_per_step
    if asked is None:
        asked = engine.max_batch * num_engines
    return -(-asked // num_engines) * num_samples


def longest_sequence(needs: RunNeeds) -> int:
    """Return the tokens of a prompt and its answer at most; 0 for a config without sampling."""
    if needs.sampling is None:
        return 0
    limit = needs.prompts.max_prompt_tokens if needs.prompts else 0
    return (limit or ANY_PROMPT_TOKENS) + needs.sampling.max_tokens
