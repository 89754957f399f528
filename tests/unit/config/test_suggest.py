"""Unknown settings: what TRL, slime and verl call one of ours, and the key that is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.config.load import load
from spmd_rl.controller.run.recipe import Invocation
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import dpo, grpo, sft

NEEDED = ["model=m", "data=d"]


def refused(config: type, *words: str) -> str:
    """Return what is said of `words` of a command line, beside the settings that are needed."""
    with pytest.raises(ConfigError) as error:
        load(config, None, [*NEEDED, *Invocation.parse(["grpo", *words]).overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "program", "key"),
    [
        ("--num_generations=8", "TRL", "sampling.num_samples"),
        ("--gradient_checkpointing", "TRL", "trainer.backend.recompute"),
        ("--beta=0.1", "TRL", "kl.coef"),
        ("--trainer.lora.r=8", "TRL", "trainer.lora.rank"),
        ("--trainer.warmup_ratio=0.1", "TRL", "trainer.warmup_steps"),
        ("--n-samples-per-prompt=8", "slime", "sampling.num_samples"),
        ("--rollout.n=8", "verl", "sampling.num_samples"),
        ("--actor_rollout_ref.rollout.n=8", "verl", "sampling.num_samples"),
        ("--actor.kl_loss_coef=0.1", "verl", "kl.coef"),
        ("--critic.optim.lr=1", "verl", "critic.lr"),
        ("--trainer.nnodes=2", "verl", "--nproc"),
        # ours has a key of the first word, which takes a value or a table of any names
        ("--data.train_batch_size=64", "verl", "prompts_per_step"),
        ("--data.train_files=x", "verl", "data"),
        ("--algorithm.adv_estimator=grpo", "verl", "algorithm"),
        ("--num_generation=8", "TRL", "sampling.num_samples"),
    ],
)
def test_a_name_of_another_program_is_answered(words: str, program: str, key: str) -> None:
    said = refused(grpo.Config, *words.split())
    assert said.startswith(f"unknown key '{words.split('=')[0].split()[0].removeprefix('--')}'; ")
    assert f"; {program}'s " in said
    assert f" is '{key}' here" in said


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("--logging_steps=1", "every step is logged"),
        ("--packing", "sequences are always packed"),
        ("--actor_rollout_ref.actor.ppo_epochs=2", "every sample is learned from once"),
        ("--push_to_hub", "`spmd-rl export`, then `hf upload`"),
    ],
)
def test_a_setting_that_we_do_not_have_is_said_so(word: str, why: str) -> None:
    assert f" is no setting here: {why}" in refused(grpo.Config, word)


def test_a_setting_of_verl_without_a_counterpart_is_said_so() -> None:
    for name in ("rollout.load_format", "actor_rollout_ref.actor.fsdp_config.forward_prefetch"):
        said = refused(grpo.Config, f"--{name}=x")
        assert said.startswith(f"unknown key '{name}'; it has the form of verl's settings, and")


def test_what_a_name_means_depends_on_the_recipe() -> None:
    assert "is 'pairs_per_step' here" in refused(sft.Config, "--train_batch_size=8")
    assert "is 'kl.coef' in other recipes, and this one has no such" in refused(
        sft.Config, "--beta=1"
    )
    assert "is 'reference' here" in refused(dpo.Config, "--ref_model=x")
    assert load(dpo.Config, None, [*NEEDED, "beta=0.2"]).beta == 0.2


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("data.train_batch_size=64", "; verl's 'data.train_batch_size' is 'prompts_per_step' or "),
        ("actor_rollout_ref.rollout.n=8", "; verl's 'rollout.n' is 'sampling.num_samples' here"),
        ("+trainer.val_before_train=true", "; verl's 'trainer.val_before_train' is 'eval.before'"),
        ("num_generations=8", "; TRL's 'num_generations' is 'sampling.num_samples' here"),
        ("trainer.lr=1e-5", ", so write --trainer.lr=1e-5"),
        ("hello", ""),
    ],
)
def test_words_without_dashes_are_told_how_to_write_them(word: str, answer: str) -> None:
    said = refused(grpo.Config, word)
    assert said.startswith(f"cannot read '{word}': settings are written --a.b=c{answer}")


def test_a_file_with_names_of_another_program_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "verl.toml"
    file.write_text("[data]\ntrain_batch_size = 64\n")
    with pytest.raises(ConfigError, match="verl's 'data.train_batch_size' is 'prompts_per_step'"):
        load(grpo.Config, file, ["model=m"])
    file.write_text("[data]\n'a.jsonl' = 1.0\n[actor_rollout_ref.rollout]\nn = 4\n")
    with pytest.raises(ConfigError, match="verl's 'rollout.n' is 'sampling.num_samples' here"):
        load(grpo.Config, file, ["model=m"])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("lora.rank", ["trainer.lora.rank"]),
        ("lora_rank", ["trainer.lora.rank"]),
        ("trainer.rl", ["trainer.lr"]),
        ("save_every", ["run.save_every"]),
        ("n_samples", ["sampling.num_samples"]),
        ("critic.clip_nrom", ["critic.clip_norm"]),
        ("max_tokens", ["sampling.max_tokens", "trainer.max_tokens"]),
        ("tp", ["split.train.tp", "split.infer.tp"]),
        ("loraa.rank", ["trainer.lora"]),
        ("traienr.optimizer.kind", ["trainer.optimizer.kind"]),
        ("eval.threshhold", ["eval.threshold"]),
    ],
)
def test_the_key_that_is_meant(name: str, keys: list[str]) -> None:
    end = refused(grpo.Config, f"--{name}=1").partition("; ")[2]
    said, *others = end.split("'")[1::2]
    assert [said, *others] == keys
    assert end.startswith("the nearest known key")
