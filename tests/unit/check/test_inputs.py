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

from spmd_rl.check.inputs import check_inputs
from spmd_rl.data.prompt_format import CHECKED_CHARACTERS, CHECKED_PROMPTS
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.hooks.config import HookConfig
from spmd_rl.model.hf import random_weights
from spmd_rl.model.spec import ModelSpec
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
    weights = dict(random_weights(ModelSpec.from_folder(model), 0))
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
    with pytest.raises(DataError, match=r"data.jsonl:1: answer: .* --prompts.answer_key= learns"):
        check_inputs(model=str(model), data=str(data), prompts=cfg, learn="all")
