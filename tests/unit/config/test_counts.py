"""Counts that no run could work with are refused when the config is read, by name."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from spmd_rl.controller.run.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError

ARITHMETIC = str(Path(__file__).parents[3] / "examples/arithmetic/recipe.py")
RL = ("grpo", "grpo_async", ARITHMETIC)
EVERY = (*RL, "sft")


def configured(recipe: str, setting: str) -> object:
    return load_recipe(recipe).configure(
        Invocation.parse([recipe, "--model=m", "--data=d.jsonl", f"--{setting}"])
    )


REFUSED = [
    *[(recipe, "steps=-1", "steps = -1: expected 0 or more") for recipe in EVERY],
    *[(recipe, "prompts_per_step=0", "prompts_per_step = 0: expected 1 or more") for recipe in RL],
    *[
        (recipe, "sampling.num_samples=1", "sampling.num_samples = 1: expected 2 or more")
        for recipe in RL
    ],
    *[
        (recipe, "sampling.num_samples=0", "sampling: num_samples = 0: expected at least 1")
        for recipe in RL
    ],
    *[
        (recipe, "sampling.max_tokens=0", "sampling: max_tokens = 0: expected at least 1")
        for recipe in RL
    ],
    *[(recipe, "clip_low=-0.1", "clip_low = -0.1: expected 0 or more") for recipe in RL],
    *[(recipe, "clip_high=nan", "clip_high = nan: expected 0 or more") for recipe in RL],
    *[
        (recipe, "prompts.max_prompt_tokens=-1", "max_prompt_tokens = -1: expected 0 or more")
        for recipe in EVERY
    ],
    *[
        (recipe, "run.verify_every=-1", "run: verify_every = -1: expected 0 or more")
        for recipe in EVERY
    ],
    *[
        (recipe, "run.save_every=-1", "run: save_every = -1: expected 0 or more")
        for recipe in EVERY
    ],
    (
        "grpo",
        "hooks.deadline_s=inf",
        "hooks: deadline_s = inf: expected 0 (none) or more, and finite",
    ),
    *[
        (recipe, "trainer.lr=-1", "trainer: lr = -1.0: expected 0 or more, and finite")
        for recipe in EVERY
    ],
    ("sft", "pairs_per_step=0", "pairs_per_step = 0: expected 1 or more"),
    (ARITHMETIC, "warmup_steps=-1", "warmup_steps = -1: expected 0 or more"),
    (ARITHMETIC, "warmup_pairs=0", "warmup_pairs = 0: expected 1 or more"),
    (ARITHMETIC, "warmup_lr=-1", "warmup_lr = -1.0: expected 0 or more"),
]


@pytest.mark.parametrize(("recipe", "setting", "sentence"), REFUSED)
def test_a_count_that_cannot_work(recipe: str, setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        configured(recipe, setting)
    assert sentence in str(told.value)


# of settings that belong to the recipe and not to a part of it
NOT_OF_A_PART = {
    "trainer.model=x": "unknown key 'trainer.model'; the nearest known key is 'model'",
    "engine.model=x": "unknown key 'engine.model'; the nearest known key is 'model'",
    "engine.reward=x": "unknown key 'engine.reward'; the nearest known key is 'reward'",
    "trainer.wrap=x": "unknown key 'trainer.wrap'; the nearest known key is 'trainer.backend.wrap'",
    "trainer.recompute=x": "unknown key 'trainer.recompute'; the nearest known key is "
    "'trainer.backend.recompute'",
    "engine.kind=vllm": "engine.kind: expected one of 'native', 'sglang', 'plain', got 'vllm'",
    "prompts.path=x": "unknown key 'prompts.path'",
    "sampling.seed=9": "unknown key 'sampling.seed'; the nearest known keys are 'run.seed', "
    "'prompts.seed' and 'trainer.seed'",
}


@pytest.mark.parametrize(
    ("recipe", "setting"),
    [*product(RL, NOT_OF_A_PART), ("sft", "trainer.model=x"), ("sft", "prompts.path=x")],
)
def test_a_key_that_would_be_ignored(recipe: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(NOT_OF_A_PART[setting])):
        configured(recipe, setting)


@pytest.mark.parametrize("recipe", EVERY)
def test_the_least_that_works(recipe: str) -> None:
    assert configured(recipe, "steps=0").steps == 0  # type: ignore[attr-defined]
