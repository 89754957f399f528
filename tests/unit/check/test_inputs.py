"""Input that the launching process refuses, without loading torch or transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.check import inputs
from spmd_rl.check.inputs import check_inputs
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.render.prompt_format import CHECKED_CHARACTERS, CHECKED_PROMPTS
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.rewards.config import GraderConfig, RemoteConfig
from spmd_rl.train.config import TrainerConfig

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"
LOOK = """
import os, sys
import numpy
from spmd_rl.check.inputs import check_inputs
from spmd_rl.data.prompts import PromptConfig
threads = len(os.listdir("/proc/self/task"))
check_inputs(model=sys.argv[1], data=sys.argv[2], prompts=PromptConfig())
assert not {"torch", "transformers"} & set(sys.modules)
assert len(os.listdir("/proc/self/task")) == threads, "those of tokenizers, which a fork loses"
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE / "model", tmp_path / "model"))


def _check(model: Path, rows: list[dict[str, Any]], init: str = "random", **prompts: Any) -> None:
    data = model.with_name("data.jsonl")
    data.write_text("".join(json.dumps({"answer": "1"} | row) + "\n" for row in rows))
    check_inputs(
        model=str(model),
        data=str(data),
        prompts=PromptConfig(**prompts),
        trainer=TrainerConfig(init=init),
    )


def test_no_torch_and_no_threads(model: Path) -> None:
    """Ranks are forked from the process that looks: a tokenizer that had threads before is slow in
    each of them.
    """
    words = [sys.executable, "-c", LOOK, str(model), str(EXAMPLE / "train.jsonl")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_that_do_not_fit_the_config(model: Path) -> None:
    weights = dict(random_weights(read_spec(model), 0))
    save_file(weights, model / "model.safetensors")
    _check(model, [{"prompt": "1+1="}], init="folder")
    save_file(weights | {"model.norm.weight": torch.ones(3)}, model / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight is \[3\], and the config asks for \[64\]"
    ):
        _check(model, [{"prompt": "1+1="}], init="folder")
    _check(model, [{"prompt": "1+1="}], init="random")
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(ConfigError, match="is not a readable safetensors file"):
        _check(model, [{"prompt": "1+1="}], init="folder")


def test_a_pattern_that_names_no_parameter(model: Path) -> None:
    trainer = TrainerConfig(init="random", freeze=("model.embed.*",))
    with pytest.raises(ConfigError, match="the nearest is 'model.embed_tokens.weight'"):
        check_inputs(model=str(model), data=str(EXAMPLE / "train.jsonl"), trainer=trainer)


def test_a_broken_token_file(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not load"):
        _check(model, [{"prompt": "1+1="}])


def test_empty_and_long_prompts(model: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:2: prompt: the prompt is empty"):
        _check(model, [{"prompt": "1+1="}, {"prompt": ""}])
    with pytest.raises(
        DataError,
        match=r"data\.jsonl:1: prompt: the prompt has 202 tokens, but the model's context of 128",
    ):
        _check(model, [{"prompt": "1+" * 101}])
    _check(model, [{"prompt": "1+" * 101}], max_prompt_tokens=100)


def test_only_the_first_prompts_are_tokenised(model: Path) -> None:
    good, empty = {"prompt": "1+1="}, {"prompt": ""}
    with pytest.raises(
        DataError, match=rf"data\.jsonl:{CHECKED_PROMPTS}: prompt: the prompt is empty"
    ):
        _check(model, [*[good] * (CHECKED_PROMPTS - 1), empty])
    _check(model, [*[good] * CHECKED_PROMPTS, empty])
    _check(model, [{"prompt": "1" * (CHECKED_CHARACTERS + 1)}, empty])


def test_messages(model: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    with pytest.raises(DataError, match="a list of messages needs chat_template = true"):
        _check(model, [{"prompt": "1+1="}, {"prompt": messages}])
    with pytest.raises(ConfigError, match="this model's tokenizer has no chat template"):
        _check(model, [{"prompt": messages}], chat_template=True)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    _check(model, [{"prompt": messages}, {"prompt": "1+1="}], chat_template=True)
    with pytest.raises(
        DataError, match=r"data\.jsonl:1: prompt\[0\]: expected a message with 'role' and 'content'"
    ):
        _check(model, [{"prompt": [{"role": "user"}]}], chat_template=True)


@pytest.mark.parametrize(
    ("kind", "line", "sentence"),
    [
        ("reward", "def f(sample)", r"reward .*f\(sample\): write it as reward\(prompt, sample\)"),
        (
            "generate",
            "def f(ctx, prompt, engine)",
            r"hooks\.generate .* write it as async gen",
        ),
        (
            "pick_sources",
            "def f(ctx, step, sources)",
            r"hooks\.pick_sources .*: write it as pick_sources\(step, sources\)",
        ),
        (
            "keep_group",
            "def f(group)",
            r"hooks\.keep_group .*: write it as keep_group\(ctx",
        ),
    ],
)
def test_a_hook_of_another_signature(
    tmp_path: Path, model: Path, kind: str, line: str, sentence: str
) -> None:
    file = tmp_path / "hooks.py"
    file.write_text(f"{line}:\n    pass\ndef good(prompt, sample):\n    return 1\n")
    reward = {f"{file}:good": 1.0} | ({f"{file}:f": 0.5} if kind == "reward" else {})
    settings = {kind: f"{file}:f"} if kind != "reward" else {}
    with pytest.raises(ConfigError, match=sentence):
        check_inputs(
            model=str(model),
            data=str(EXAMPLE / "train.jsonl"),
            reward=reward,
            hooks=HookConfig(**settings),
        )


def test_a_record_names_a_reward_that_is_loaded(tmp_path: Path, model: Path) -> None:
    file, data = tmp_path / "hooks.py", tmp_path / "data.jsonl"
    file.write_text(
        "def own(prompt, sample):\n    return 1\ndef more(prompt, sample):\n    return 1"
    )
    names = [f"{file}:own", {f"{file}:more": 1, f"{file}:own": 2}, None]
    rows = [{"prompt": "1+1=", "answer": "2", "grader": name} for name in names]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def check(*extra: str) -> None:
        check_inputs(
            model=str(model),
            data=str(data),
            reward=f"{file}:own",
            prompts=PromptConfig(reward_key="grader"),
            hooks=HookConfig(extra_rewards=extra),
        )

    check(f"{file}:more")
    with pytest.raises(
        DataError,
        match=r"data\.jsonl:2: grader: it names the reward '.*:more', but only these are loaded: "
        r".*:own: add it to hooks\.extra_rewards",
    ):
        check()


def test_every_file_of_a_mixture_is_checked(tmp_path: Path, model: Path) -> None:
    good, bad = tmp_path / "good.csv", tmp_path / "bad.csv"
    good.write_text("prompt,answer\n1+1=,2\n")
    bad.write_text("prompt,result\n1+1=,2\n")

    def check(*paths: Path, pick: str = "") -> None:
        check_inputs(
            model=str(model),
            data={str(path): 0.5 for path in paths},
            prompts=PromptConfig(),
            hooks=HookConfig(pick_sources=pick),
        )

    check(good)
    with pytest.raises(DataError, match=r"bad\.csv:2: answer: no such key in this record"):
        check(good, bad)
    file = tmp_path / "hooks.py"
    file.write_text("def pick(step, sources):\n    return {sources[0]: 1}\n")
    with pytest.raises(
        ConfigError, match="pick_sources weights several sources, but data has only"
    ):
        check(good, pick=f"{file}:pick")


def test_of_a_large_file_the_first_part_is_checked(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "1+1="}] * 5000
    monkeypatch.setattr(inputs, "CHECKED_BYTES", 3000 * len('{"answer": "1", "prompt": "1+1="}\n'))
    _check(model, [*rows, {"prompt": None}])
    with pytest.raises(DataError, match=r"data\.jsonl:2001: prompt: expected a string"):
        _check(model, [*rows[:2000], {"prompt": None}, *rows])


@pytest.mark.parametrize("kind", ["reward", "extra_rewards"])
def test_a_grader_that_lacks_its_server_is_refused(model: Path, kind: str) -> None:
    data = model.with_name("data.jsonl")
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    name = "spmd_rl.rewards.remote.remote:remote"
    reward = name if kind == "reward" else ""
    hooks = HookConfig(extra_rewards=(name,) if kind == "extra_rewards" else ())

    def check(**settings: Any) -> None:
        graders = GraderConfig(remote=RemoteConfig(**settings))
        check_inputs(model=str(model), data=str(data), reward=reward, hooks=hooks, graders=graders)

    check(url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="graders.remote.url = '': expected the address"):
        check()
    with pytest.raises(ConfigError, match="expected less than hooks.deadline_s, which is 30"):
        check(url="http://127.0.0.1:1", deadline_s=30.0)


def test_conversations(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    data = model.with_name("data.jsonl")
    user, said = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}

    def check(*messages: dict[str, Any], **prompts: Any) -> None:
        data.write_text(json.dumps({"messages": messages}) + "\n")
        cfg = PromptConfig(prompt_key="messages", answer_key="", **prompts)
        check_inputs(model=str(model), data=str(data), prompts=cfg, learn="all")

    check(user, said, chat_template=True)
    with pytest.raises(DataError, match=r"data.jsonl:1: messages: .* no assistant message to"):
        check(user, chat_template=True)
    with pytest.raises(DataError, match=r"data.jsonl:1: messages: every assistant message"):
        check(user, said | {"weight": 0}, chat_template=True)
    with pytest.raises(DataError, match="a list of messages needs chat_template = true"):
        check(user, said)
    cfg = PromptConfig(prompt_key="messages", chat_template=True)
    with pytest.raises(DataError, match=r"data.jsonl:1: answer: .* --prompts.answer_key=$"):
        check_inputs(model=str(model), data=str(data), prompts=cfg, learn="all")
