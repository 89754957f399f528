"""Settings of evaluation sets, from the command line and from a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.dump import dump_toml
from spmd_rl.config.load import load
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import ConfigError
from spmd_rl.evaluation.config import EvalConfig, ResolvedSet, eval_rewards, resolve_sets
from spmd_rl.recipes import grpo
from spmd_rl.recipes.rollout_settings import rollout_settings
from spmd_rl.rollout.engine import SamplingConfig

RUN = SamplingConfig(num_samples=8, temperature=0.7, top_p=0.9, max_tokens=64)
WORDS = [
    "every=20",
    "num_samples=2",
    "sampling.temperature=0",
    "sets.gsm.data=gsm.jsonl",
    "sets.gsm.num_samples=4",
    "sets.gsm.sampling.max_tokens=512",
    "sets.gsm.prompts.prompt_key=question",
    "sets.gsm.reward=a:f",
    "sets.own.data=own.jsonl@[0:9]",
]
TOML = """
every = 20
num_samples = 2
sampling.temperature = 0

[sets.gsm]
data = "gsm.jsonl"
num_samples = 4
sampling.max_tokens = 512
prompts.prompt_key = "question"
reward = "a:f"

[sets.own]
data = "own.jsonl@[0:9]"
"""


def sets(*words: str) -> dict[str, ResolvedSet]:
    cfg = load(EvalConfig, overrides=words)
    return {one.name: one for one in resolve_sets(cfg, RUN, PromptConfig(answer_key="a"))}


def test_a_single_set_has_the_settings_of_the_run_but_for_n() -> None:
    (one,) = sets("data=some/gsm8k test.jsonl@[10:]").values()
    assert (one.name, one.data) == ("gsm8k_test", "some/gsm8k test.jsonl@[10:]")
    assert one.sampling == SamplingConfig(
        temperature=0.7, top_p=0.9, max_tokens=64, replay_filters=False
    )
    assert one.prompts == PromptConfig(answer_key="a", shuffle=False)
    assert (one.reward, one.threshold) == ({}, 1.0)


def test_sets_differ_from_the_others_only_where_they_say_so() -> None:
    found = sets(*WORDS, "threshold=0.5", "sets.own.threshold=0.9")
    gsm, own = found["gsm"], found["own"]
    assert gsm.sampling.temperature == own.sampling.temperature == 0
    assert (gsm.sampling.num_samples, own.sampling.num_samples) == (4, 2)
    assert (gsm.sampling.max_tokens, own.sampling.max_tokens) == (512, 64)
    assert (gsm.prompts.prompt_key, own.prompts.prompt_key) == ("question", "prompt")
    assert gsm.prompts.answer_key == own.prompts.answer_key == "a"
    assert (gsm.reward, own.reward) == ({"a:f": 1.0}, {})
    assert (gsm.threshold, own.threshold) == (0.5, 0.9)


def test_a_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "eval.toml"
    path.write_text(TOML)
    from_file, from_words = load(EvalConfig, path), load(EvalConfig, overrides=WORDS)
    assert from_file == from_words
    written = tmp_path / "written.toml"
    written.write_text(dump_toml(from_file))
    assert load(EvalConfig, written) == from_file
    assert tomllib.loads(written.read_text())["sets"]["gsm"]["data"] == "gsm.jsonl"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=a.jsonl", "sets.b.data=b.jsonl"], "data and sets cannot both be given"),
        (["sets.b.num_samples=2"], "sets.b.data is required"),
        (["sets.b.data=x", "sets.b.numsamples=2"], "unknown key 'sets.b.numsamples'"),
        (['sets={"a/b": {"data": "x"}}'], "name of a set = 'a/b': expected letters"),
        (["every=-1"], "every = -1: expected 0 or more"),
        (["num_samples=0"], "num_samples = 0: expected 1 or more"),
        (["data=x", "sampling.temprature=0"], "unknown key 'eval.sampling.temprature'"),
        (["data=x", "sampling.top_p=2"], "eval.sampling: top_p = 2.0: expected in (0, 1]"),
        (["data=x", "sampling.top_p=high"], "eval.sampling.top_p: expected a number"),
        (["data=x", "sampling.num_samples=2"], "set eval.num_samples instead"),
        (
            ["sets.b.data=x", "sets.b.sampling.num_samples=2"],
            "set eval.sets.b.num_samples instead",
        ),
        (["data=x", "prompts.kye=2"], "unknown key 'eval.prompts.kye'"),
        (["data=x", 'reward={"a:f": 1, "b:f": 1}'], "two functions are called 'f'"),
    ],
)
def test_what_cannot_work_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as told:
        sets(*words)
    assert sentence in str(told.value)


def test_the_rollout_loads_the_rewards_of_all_sets() -> None:
    words = {
        "model": "m",
        "data": "d",
        "reward": "a:run",
        "hooks.extra_rewards": '["a:extra", "a:one"]',
        "eval.reward": "a:all",
        "eval.sets.x.data": "x",
        "eval.sets.y.data": "y",
        "eval.sets.y.reward": '{"a:one": 1, "a:two": 0.5}',
    }
    cfg = load(grpo.Config, overrides=words)
    assert eval_rewards(cfg.eval) == ["a:all", "a:one", "a:two"]
    settings: dict[str, Any] = rollout_settings(cfg)
    assert settings["reward"] == "a:run"
    assert settings["hooks"].extra_rewards == ("a:extra", "a:one", "a:all", "a:two")
    assert settings["settings"]["eval"]["sets"]["y"]["reward"] == {"a:one": 1.0, "a:two": 0.5}
