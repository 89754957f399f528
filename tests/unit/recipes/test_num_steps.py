"""Steps of a run from passes over its data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import distill, dpo, grpo, pretrain, replay, reward_model, sft
from spmd_rl.recipes.num_steps import first_step, num_steps
from spmd_rl.train.config import learning_rate

NEEDED = ["model=m", "data=d", "prompts_per_step=32"]


@pytest.mark.parametrize(
    ("words", "num_prompts", "expected"),
    [
        ([], 100, 200),
        (["steps=7"], 100, 7),
        (["steps=0"], 100, 0),
        (["epochs=1"], 320, 10),
        (["epochs=1"], 321, 11),
        (["epochs=2.5"], 320, 25),
        (["epochs=0.1"], 960, 3),
        (["epochs=0.3"], 320, 3),
        (["epochs=0.001"], 320, 1),
    ],
)
def test_how_many_steps(words: list[str], num_prompts: int, expected: int) -> None:
    cfg = load(grpo.Config, overrides=NEEDED + words)
    assert num_steps(cfg, range(num_prompts), 32) == expected


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["epochs=1", "steps=7"], "epochs = 1.0: expected 0 beside steps = 7: give one"),
        (["epochs=-1"], "epochs = -1.0: expected 0 (steps counts) or more, and finite"),
        (["start_step=-1"], "start_step = -1: expected 0 or more"),
        (["start_step=7", "steps=7"], "start_step = 7: expected less than steps = 7"),
        (["epochs=inf"], "epochs = inf: expected 0 (steps counts) or more, and finite"),
    ],
)
def test_lengths_that_cannot_be(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        load(grpo.Config, overrides=NEEDED + words)
    assert sentence in str(told.value)


LINEAR = ["trainer.schedule=linear", "trainer.total_steps=6"]


@pytest.mark.parametrize(
    ("words", "key", "needed"),
    [
        (["steps=6", "trainer.minibatches=2"], "trainer", 12),
        (["steps=7"], "trainer", 7),
        (["steps=7", "trainer.schedule=cosine", "trainer.warmup_steps=5"], "trainer", 7),
        (["steps=7", "start_step=3"], "trainer", 7),
        (["algorithm=ppo", "steps=9", "critic_warmup_steps=2"], "trainer", 7),
        (
            ["algorithm=ppo", "steps=4", "critic.schedule=linear", "critic.total_steps=3"],
            "critic",
            4,
        ),
    ],
)
def test_a_rate_of_zero_is_refused(words: list[str], key: str, needed: int) -> None:
    """The oracle is the rate of each optimizer step, which is 0 from `total_steps` on."""
    with pytest.raises(ConfigError, match=rf"{key}.total_steps = \d: a run of .* {needed} optim"):
        load(grpo.Config, overrides=[*NEEDED, *LINEAR, *words])
    fitting = [f"{key}.total_steps={needed}"]
    cfg = getattr(load(grpo.Config, overrides=[*NEEDED, *LINEAR, *words, *fitting]), key)
    rates = [learning_rate(cfg, step) for step in range(needed + 1)]
    assert min(rates[:-1]) > 0
    assert rates[-1] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["steps=6"],
        ["steps=3", "trainer.minibatches=2"],
        ["steps=2"],
        ["steps=99", "trainer.schedule=constant"],
        ["algorithm=ppo", "steps=8", "critic_warmup_steps=2"],
        ["steps=6", "critic_warmup_steps=0"],
    ],
)
def test_a_schedule_that_lasts_is_accepted(words: list[str]) -> None:
    load(grpo.Config, overrides=[*NEEDED, *LINEAR, *words])


def test_epochs_are_counted_once_the_data_is_known() -> None:
    cfg = load(grpo.Config, overrides=[*NEEDED, *LINEAR, "epochs=1"])
    assert num_steps(cfg, 6 * 32, 32) == 6
    with pytest.raises(ConfigError, match="takes 7 optimizer steps"):
        num_steps(cfg, 6 * 32 + 1, 32)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["trainer.lr=0"], "trainer.lr = 0: nothing is learned\n"),
        (
            ["steps=3", "trainer.minibatches=2", "trainer.warmup_steps=12", "trainer.lr=0.5"],
            "trainer.warmup_steps = 12 is more than the 6 optimizer steps of this run: its "
            "learning rate ends at 0.25, not at trainer.lr = 0.5\n",
        ),
        (["steps=6", "trainer.warmup_steps=6"], ""),
        (["steps=0", "trainer.warmup_steps=6"], ""),
    ],
)
def test_what_the_rate_leaves_undone_is_said(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    num_steps(load(grpo.Config, overrides=[*NEEDED, *words]), 100, 32)
    assert capsys.readouterr().out == sentence


def test_supervised_steps_before_the_others_raise_the_rate_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cfg = load(grpo.Config, overrides=[*NEEDED, "steps=3", "trainer.warmup_steps=12"])
    assert num_steps(cfg, 100, 32, before=9) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("recipe", [sft, dpo, reward_model, pretrain, distill])
def test_every_recipe_with_steps_is_checked(recipe: Any) -> None:
    needed = {
        "sft": ["model=m", "data=d"],
        "dpo": ["model=m", "data=d"],
        "reward_model": ["model=m", "data=d"],
        "pretrain": ["model=m", "data=d"],
        "distill": ["model=m", "data=d", "teacher=t"],
    }[recipe.__name__.rpartition(".")[2]]
    with pytest.raises(ConfigError, match="takes 12 optimizer steps"):
        load(recipe.Config, overrides=[*needed, *LINEAR, "steps=6", "trainer.minibatches=2"])


def test_a_replay_has_no_epochs() -> None:
    with pytest.raises(ConfigError, match="a replay counts in steps"):
        load(replay.Config, overrides=[*NEEDED, "recorded=r", "epochs=1"])


def test_a_replay_has_no_start_step() -> None:
    with pytest.raises(ConfigError, match="a replay begins with the first step"):
        load(replay.Config, overrides=[*NEEDED, "recorded=r", "start_step=1"])


@pytest.mark.parametrize(("resumed", "expected", "skipped"), [(0, 3, [12]), (5, 5, []), (3, 3, [])])
def test_where_a_run_begins(resumed: int, expected: int, skipped: list[int]) -> None:
    """A checkpoint goes before the start step, which only a new run skips to."""
    cfg = load(grpo.Config, overrides=["model=m", "data=d", "prompts_per_step=4", "start_step=3"])
    told: list[int] = []
    trainer: Any = SimpleNamespace(begin_after=SimpleNamespace(call=told.append))
    skips: list[int] = []
    data: Any = SimpleNamespace(skip=skips.append)
    assert first_step(cfg, resumed, [trainer], data, 4) == expected
    assert skips == skipped
    assert told == ([3] if skipped else [])
