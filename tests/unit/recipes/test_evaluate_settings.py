"""An evaluation with the settings of a run: those of its prompts, its reward and its trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.cli.main import words_of_evaluation
from spmd_rl.config.dump import dump_toml
from spmd_rl.config.load import load
from spmd_rl.controller.run.checkpoints import Checkpoints, CheckpointState
from spmd_rl.controller.run.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError
from spmd_rl.evaluation.config import resolve_sets
from spmd_rl.mesh.split import PolicySplit
from spmd_rl.recipes import dpo, grpo, grpo_fully_async, reward_model, rlhf, sft
from spmd_rl.recipes.evaluate import Config

RUN = """
model = "m"
data = "train.jsonl"
reward = "math"
steps = 40
prompts_per_step = 8
algorithm = "dapo"

[eval]
every = 20
num_samples = 4
seed = 3
threshold = 0.5
sampling.temperature = 0.0
prompts.template_kwargs.short = true

[eval.sets.hard]
data = "hard.jsonl"
prompts.system = "think"

[prompts]
chat_template = true
system = "be brief"
prompt_key = "question"
template_kwargs = {enable_thinking = false}

[sampling]
num_samples = 16
max_tokens = 99
top_p = 0.9

[trainer]
lr = 1e-5

[run]
name = "mine"
exact = false
row_shards = 2

[split]
train.ranks = "0"
infer.ranks = "1"
"""


def evaluated(*words: str) -> Config:
    found = load_recipe("evaluate").configure(Invocation.parse(["evaluate", *words]))
    assert isinstance(found, Config)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(RUN)
    return path


@pytest.mark.parametrize("as_folder", [False, True])
def test_the_sets_of_a_run_are_resolved_as_the_run_does(file: Path, as_folder: bool) -> None:
    cfg = evaluated(f"--config={file.parent if as_folder else file}")
    of_run = load(grpo.Config, file)
    ours = resolve_sets(cfg.eval, cfg.sampling, cfg.prompts)
    theirs = resolve_sets(of_run.eval, of_run.sampling, of_run.prompts)
    assert ours == theirs
    assert ours[0].sampling.temperature == 0
    assert ours[0].prompts.template_kwargs == {"enable_thinking": False, "short": True}
    assert (cfg.reward, cfg.seed, cfg.threshold) == ("math", 3, 0.5)
    assert (cfg.run.name, cfg.run.exact, cfg.split) == ("evaluate", False, PolicySplit())
    assert cfg.run.row_shards == 2


def test_the_command_line_goes_before_the_file(file: Path) -> None:
    cfg = evaluated(
        f"--config={file}", "--data=other.jsonl", "--sampling.num_samples=2", "--reward=exact"
    )
    (one,) = resolve_sets(cfg.eval, cfg.sampling, cfg.prompts)
    assert (one.name, one.data, one.sampling.num_samples) == ("other", "other.jsonl", 2)
    assert (one.prompts.system, one.sampling.top_p, cfg.reward) == ("be brief", 0.9, "exact")
    (named,) = evaluated(f"--config={file}", "--sets.easy.data=easy.jsonl").eval.named_sets()
    assert named == "easy"


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (grpo, []),
        (grpo_fully_async, []),
        (rlhf, ["reward_model=r"]),
        (sft, []),
        (dpo, ["prompts.chosen_key=good"]),
        (reward_model, []),
    ],
)
def test_the_config_that_each_recipe_writes_is_accepted(
    tmp_path: Path, recipe: Any, more: list[str]
) -> None:
    words = ["model=m", "data=d", "eval.data=test.jsonl", *more]
    (tmp_path / "config.toml").write_text(dump_toml(load(recipe.Config, overrides=words)))
    cfg = evaluated(f"--config={tmp_path}")
    assert (cfg.model, cfg.data) == ("m", "test.jsonl")


def test_a_key_of_no_recipe_is_said_and_a_wrong_one_within_a_table_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("my_own = 1\n" + RUN)
    evaluated(f"--config={file}")
    assert capsys.readouterr().out == "an evaluation does not use my_own\n"
    file.write_text(RUN.replace("max_tokens", "max_token"))
    with pytest.raises(ConfigError, match=r"unknown key 'sampling.max_token'"):
        evaluated(f"--config={file}")
    file.write_text('model = "m"\ndata = "d"\nrewrad = "math"\n')
    with pytest.raises(ConfigError, match="unknown key 'rewrad'"):
        evaluated(f"--config={file}")


def test_a_file_of_its_own_is_read_as_it_stands(file: Path) -> None:
    file.write_text('model = "m"\ndata = "d.jsonl"\n[run]\nname = "mine"\n')
    cfg = evaluated(f"--config={file}")
    assert (cfg.data, cfg.run.name) == ("d.jsonl", "mine")


def test_a_run_without_sets_needs_one(file: Path) -> None:
    file.write_text('model = "m"\ndata = "train.jsonl"\nsteps = 3\n')
    with pytest.raises(ConfigError, match="there is no set"):
        evaluated(f"--config={file}")
    assert evaluated(f"--config={file}", "--data=test.jsonl").data == "test.jsonl"


@pytest.mark.parametrize("rank", [0, 8])
def test_a_checkpoint_brings_the_trainer_of_its_run(tmp_path: Path, rank: int) -> None:
    folder = tmp_path / "r/checkpoints/step_000004"
    folder.mkdir(parents=True)
    lora = {"rank": rank, "alpha": 7.0, "folder": "earlier" if rank else ""}
    (tmp_path / "r/config.toml").write_text(
        'model = "base"\nsteps = 4\n[trainer]\nseed = 5\noptimizer.kind = "adamw"\n'
        + "[trainer.lora]\n"
        + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lora.items())
    )
    cfg = evaluated(f"--checkpoint={folder}", "--data=test.jsonl")
    assert cfg.model == "base"
    assert (cfg.trainer.seed, cfg.trainer.lora.rank, cfg.trainer.lora.folder) == (5, rank, "")
    assert cfg.trainer.init == ("folder" if rank else "random")
    other = evaluated(f"--checkpoint={folder}", "--data=t", "--model=m", "--trainer.init=random")
    assert (other.model, other.trainer.init, other.trainer.seed) == ("m", "random", 5)
    (tmp_path / "r/config.toml").unlink()
    alone = evaluated(f"--checkpoint={folder}", "--data=t", "--model=m")
    assert (alone.trainer.init, alone.trainer.lora.rank) == ("random", 0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the folder of a run with checkpoints after steps 2 and 10."""
    run = tmp_path / "saved"
    checkpoints = Checkpoints(run / "checkpoints", 2, 0)
    for step in (2, 10):
        checkpoints.save(CheckpointState(step, 0, 0.0), {})
    checkpoints.wait_until_complete()
    (run / "config.toml").write_text(RUN)
    return run


@pytest.mark.parametrize("name", ["", "config.toml"])
def test_the_settings_of_a_run_come_with_its_newest_checkpoint(saved: Path, name: str) -> None:
    config, newest = f"--config={saved / name}", str(saved / "checkpoints/step_000010")
    cfg = evaluated(config)
    assert (cfg.checkpoint, cfg.model, cfg.trainer.init) == (newest, "m", "random")
    earlier = str(saved / "checkpoints/step_000002")
    assert evaluated(config, f"--checkpoint={earlier}").checkpoint == earlier
    other = evaluated(config, "--model=other")
    assert (other.checkpoint, other.model) == ("", "other")


def test_a_run_without_a_checkpoint_is_not_taken_for_its_first_model(file: Path) -> None:
    (file.parent / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="no checkpoint"):
        evaluated(f"--config={file}")
    assert evaluated(f"--config={file}", "--model=other").model == "other"


def test_the_first_word_of_an_evaluation_names_what_is_scored(saved: Path, tmp_path: Path) -> None:
    steps = [saved / f"checkpoints/step_{step:06d}" for step in (2, 10)]
    assert evaluated(*words_of_evaluation([str(saved)])).checkpoint == str(steps[1])
    cfg = evaluated(*words_of_evaluation([str(steps[0]), "--reward=exact"]))
    assert (cfg.checkpoint, cfg.reward, cfg.prompts.system) == (str(steps[0]), "exact", "be brief")
    (tmp_path / "config.json").write_text("{}")
    cfg = evaluated(*words_of_evaluation([str(tmp_path), "--data=d"]))
    assert (cfg.model, cfg.checkpoint) == (str(tmp_path), "")
    assert words_of_evaluation(["--model=m", "--data=d"]) == ["--model=m", "--data=d"]
    with pytest.raises(ConfigError, match="neither a model folder"):
        words_of_evaluation([str(tmp_path / "nothing")])
