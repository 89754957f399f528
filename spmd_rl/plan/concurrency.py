"""How many sequences an engine has running at once, and how long they are, from a recipe's config.

The decision what sleeps asks whether their keys and values fit beside all else. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec

ANY_PROMPT_TOKENS = 1024  # assumed of a prompt where prompts.max_prompt_tokens sets no limit


@dataclass(frozen=True)
class Running:
    """Sequences that one engine has running at once, and the tokens of each at its end."""

    num_sequences: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_sequences:,} sequences of {self.num_tokens:,} tokens"


def running(cfg: Any, engines: Placement, spec: ModelSpec) -> Running:
    """Return what each engine has running: a step's samples, spread over the engines.

    It is `engine.max_batch` at most, and that too where the config does not say how many prompts a
    step has.
    """
    sampling, prompts = getattr(cfg, "sampling", None), getattr(cfg, "prompts", None)
    num_samples = getattr(sampling, "num_samples", 1)
    asked = getattr(cfg, "prompts_per_step", cfg.engine.max_batch * engines.size)
    each = -(-asked // engines.size) * num_samples
    answer = getattr(sampling, "max_tokens", spec.max_positions)
    prompt = getattr(prompts, "max_prompt_tokens", 0) or ANY_PROMPT_TOKENS
    return Running(min(each, cfg.engine.max_batch), min(prompt + answer, spec.max_positions))
