"""A run with wrong input ends with one clear sentence, before any rank starts."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_rl.cli import command
from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.main import dispatch
from spmd_rl.observe.provenance import START_TIME_ENV
from tests.fakes.sglang_child import write_site

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"
DATA = {
    "bad.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n',
    "long.jsonl": '{"prompt": "' + "1+" * 100 + '1=", "answer": "101"}\n',
    "messages.jsonl": '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n',
}
LORA = "--trainer.lora.rank=8"
SGLANG = ("--engine.kind=sglang", "--engine.python=site", "--run.exact=false")

Refused = Callable[..., str]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Refused:
    """Return the sentence with which `spmd-rl run` of these words ends."""
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("a rank was started"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # the launcher sets it, and later tests must not see it
    monkeypatch.setenv(START_TIME_ENV, "")
    monkeypatch.chdir(tmp_path)
    for name, text in DATA.items():
        (tmp_path / name).write_text(text)

    def run(recipe: str, *words: str) -> str:
        given = [f"--model={EXAMPLE / 'model'}", f"--data={EXAMPLE / 'train.jsonl'}"]
        given += ["--trainer.init=random", "--run.name=r", "--nproc=1"]
        if recipe == "grpo":
            given.append(f"--reward={EXAMPLE / 'reward.py'}:correct")
        assert run_guarded(dispatch, ["run", recipe, *given, *words]) == 2
        assert not (tmp_path / "runs").exists()
        return capfd.readouterr().err.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--trainer.learning_rate=1", "TRL's 'learning_rate' is 'trainer.lr' here"),
        ("--stpes=3", "the nearest known key is 'steps'"),
        ("--steps=many", "steps: expected a whole number"),
        ("--model=nowhere", "no model folder at nowhere"),
        ("--data=nowhere.jsonl", "nowhere.jsonl"),
        ("--data=.", ".: this is a folder, not a file"),
        ("--reward=spmd_rl.rewards.answers.match:excat", "has no 'excat'"),
        ("--sampling.temperature=-1", "temperature = -1.0: expected 0 (greedy), or at least"),
        ("--sampling.temperature=0", "sampling.temperature = 0.0: expected more than 0"),
        ("--sampling.stop_ids=[4000]", "sampling.stop_ids holds 4000"),
        ("--config=missing.toml", "cannot read config file missing.toml"),
        (
            "--split.train.ranks=1 --split.infer.ranks=2 --nproc=2",
            "the split asks for 3 ranks (train 1, infer 2), and the world has 2",
        ),
        ("--data=bad.jsonl", "bad.jsonl:2"),
        ("--data=long.jsonl", "1: prompt: the prompt has 202 tokens, but the model's context of"),
        ("--data=messages.jsonl", "1: prompt: a list of messages needs chat_template = true"),
        (
            "--split.infer.pp=2 --nproc=2",
            "the native engine has the axes dp, fsdp, tp and ep alone",
        ),
        ("--kl.coef=0.1 --kl.estimator=k1", "set kl.unbiased = true"),
        ("--algorithm=gspo --clip_low=0.2", "clip_low = 0.2: expected less than 0.1"),
        (f"{LORA} --kl.coef=0.1 --kl.refresh_every=2", "kl.refresh_every"),
    ],
)
def test_before_anything_starts(refused: Refused, words: str, sentence: str) -> None:
    assert sentence in refused("grpo", *words.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--eval.data=missing.jsonl", "missing.jsonl"),
        ("--eval.sets.a.prompts.answer_kex=b --eval.sets.a.data=x.jsonl", "answer_key"),
        ("--eval.num_samples=4", "eval"),
    ],
)
def test_a_set_that_cannot_be_evaluated(refused: Refused, words: str, sentence: str) -> None:
    assert sentence in refused("sft", *words.split())


def test_an_unknown_recipe(refused: Refused) -> None:
    assert "did you mean grpo" in refused("gpro")


def test_a_broken_model_folder(refused: Refused, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(EXAMPLE / "model", broken)
    (broken / "config.json").write_text("{")
    assert "config.json is not JSON" in refused("grpo", "--model=broken")
    shutil.copy(EXAMPLE / "model/config.json", broken)
    words = ("--model=broken", "--trainer.init=folder")
    assert "holds no weights" in refused("grpo", *words)
    (broken / "tokenizer.json").unlink()
    no_tokenizer = "broken holds no tokenizer: there is no tokenizer.json"
    assert no_tokenizer in refused("sft", "--model=broken")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--run.exact=true", "set run.exact = false"),
        ("--engine.options.atention_backend=triton", "'attention_backend'"),
        ("--split.infer.pp=2 --nproc=2", "the SGLang engine has the axes dp, fsdp and tp alone"),
        ("--split.infer.tp=8 --nproc=8", "does not divide the 4 attention heads"),
        (LORA, "takes no adapters"),
    ],
)
def test_an_engine_that_cannot_serve(
    refused: Refused, tmp_path: Path, words: str, sentence: str
) -> None:
    write_site(tmp_path / "site")
    assert sentence in refused("grpo", *SGLANG, *words.split())
