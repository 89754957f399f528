"""Checks that `spmd-rl run` makes before it starts any rank."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl.check import command as check_command
from spmd_rl.cli import command, rank
from spmd_rl.cli.exit_code import run_guarded
from spmd_rl.cli.main import dispatch
from spmd_rl.config.dump import dump_toml
from spmd_rl.controller.run.recipe import Invocation, load_recipe, run_config
from spmd_rl.observe.provenance import START_TIME_ENV
from spmd_rl.observe.run_lock import acquire_run_lock, launcher_lock
from tests.backends.megatron_case import FAMILIES, SIZES

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Return a list that gets the number of ranks of each launch. No packages are looked for."""
    started: list[int] = []

    def launch(num_ranks: int, *rest: object) -> int:
        started.append(num_ranks)
        return 0

    monkeypatch.setattr(command, "launch", launch)
    monkeypatch.setattr(command, "check_packages", lambda trainer: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # the launcher sets it, and later tests must not see it
    monkeypatch.setenv(START_TIME_ENV, "")
    monkeypatch.chdir(tmp_path)
    return started


def run(*words: str) -> int:
    given = (
        f"--model={EXAMPLE / 'model'}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        "--run.name=r",
        "--nproc=1",
    )
    given += ("--trainer.init=random",)
    return run_guarded(
        dispatch, ["run", "grpo", *given, f"--reward={EXAMPLE / 'reward.py'}:correct", *words]
    )


def test_the_folder_of_another_run(launched: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path("runs/r")
    folder.mkdir(parents=True)
    assert run() == 0
    (folder / "notes.txt").write_text("mine")
    assert run() == 2
    assert (
        "runs/r exists and is not the folder of a run: add --run.name=r-2" in capfd.readouterr().err
    )
    (folder / "config.toml").write_text("prompts_per_step = 3\n")
    Path("runs/r-2").mkdir()
    assert run() == 2
    said = capfd.readouterr().err
    assert "runs/r holds a run with another configuration (prompts_per_step was 3" in said
    assert "add --run.name=r-3 for a new run, or --run.resume=true to go on in this one" in said
    assert run("--run.resume=true") == 0
    (folder / "notes.txt").unlink()
    assert run() == 0, "a start that made no step"
    assert launched == [1, 1, 1]


def test_a_run_without_a_name_has_its_recipes(tmp_path: Path) -> None:
    example = str(EXAMPLE / "recipe.py")
    for words, name in (
        (["grpo"], "grpo"),
        (["spmd_rl.recipes.sft"], "sft"),
        ([example], "recipe"),
        ([example, "--config", str(EXAMPLE / "demo.toml")], "demo"),
        (["grpo", "--run.name=mine"], "mine"),
    ):
        invocation = Invocation.parse([*words, "--model=m", "--data=d"])
        cfg = load_recipe(invocation.recipe).configure(invocation)
        assert run_config(cfg).path == Path("runs", name)
        assert f'name = "{name}"' in dump_toml(cfg)


def test_a_reward_of_another_program_starts_nothing(
    launched: list[int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trl.py").write_text("def reward(completions, answer, **kwargs):\n    return 1\n")
    form = "it is reward(completions, answer, **kwargs): write it as reward(prompt, sample) or "
    for setting in ("--reward=trl.py:reward", '--hooks.extra_rewards=["trl.py:reward"]'):
        assert run(setting) == 2
        assert form in capfd.readouterr().err
    evaluated = [f"--eval.data={EXAMPLE / 'train.jsonl'}@[:4]", "--eval.reward=trl.py:reward"]
    assert run(*evaluated) == 2
    assert form in capfd.readouterr().err
    assert launched == []


def test_check_of_a_recipe_refuses_what_run_refuses(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_command, "check_host", lambda *_: [])
    monkeypatch.chdir(tmp_path)
    data, folder = EXAMPLE / "train.jsonl", EXAMPLE / "model"
    given = [f"--model={folder}", f"--data={data}", "--trainer.init=random"]
    assert run_guarded(dispatch, ["check", "grpo", *given]) == 0
    said = "ok    run        grpo accepts its settings, model, data, reward and hooks\n"
    assert capfd.readouterr().out == said
    (tmp_path / "trl.py").write_text("def reward(prompts, completions, **kw):\n    return 1\n")
    assert run_guarded(dispatch, ["check", "grpo", *given, "--reward=trl.py:reward"]) == 2
    assert "write it as reward(prompt, sample) or" in capfd.readouterr().err
    assert run_guarded(dispatch, ["check", "grpo", *given, "--prompts.prompt_key=question"]) == 2
    assert "question: no such key in this record" in capfd.readouterr().err
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"__pycache__"} == {"trl.py"}, "a check leaves no files of a run"


def test_input_that_does_not_serve(launched: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    sums = str(EXAMPLE / "train.jsonl")
    for words, said in (
        (
            ["--prompts.prompt_key=question"],
            f"{sums}:1: question: no such key in this record (it has 'prompt', 'answer'",
        ),
        (
            ["--prompts.answer_key=solution"],
            f"{sums}:1: solution: no such key in this record (it has 'prompt', 'answer'",
        ),
        (["--trainer.init=folder"], "model holds no weights (neither model.safetensors nor "),
    ):
        assert run(*words) == 2
        assert said in capfd.readouterr().err
    assert launched == []


def test_the_folder_of_a_run_that_goes_on(
    launched: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path("runs/r")
    folder.mkdir(parents=True)
    held = acquire_run_lock(folder)
    assert run() == 2
    assert "another run is going on in runs/r (host " in capfd.readouterr().err
    os.close(held)
    assert run() == 0
    assert launched == [1]


def test_the_folder_of_a_run_that_begins(
    launched: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    """The run has no controller yet."""
    Path("runs/r").mkdir(parents=True)
    with launcher_lock(Path("runs/r")):
        assert run() == 2
    assert "another run is going on in runs/r (host " in capfd.readouterr().err
    assert run() == 0
    assert launched == [1]


@pytest.fixture
def most_files() -> Iterator[int]:
    """Limit the open files of this process to 40, and return the system's limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, before[1]))
    yield before[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_low_limit_of_open_files_is_raised_as_far_as_allowed(
    launched: list[int], most_files: int
) -> None:
    assert run() == 0
    expected = (
        rank.MAX_OPEN_FILES
        if most_files == resource.RLIM_INFINITY
        else min(most_files, rank.MAX_OPEN_FILES)
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (expected, most_files)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the models `dense` and `mixture`, of four layers and four heads."""
    base = tmp_path_factory.mktemp("models")
    for name, family in {"dense": "qwen3", "mixture": "qwen3_moe"}.items():
        shutil.copytree(EXAMPLE / "model", base / name)
        config = SIZES | FAMILIES[family] | {"vocab_size": 104}  # as many as the tokenizer has
        (base / name / "config.json").write_text(json.dumps(config))
    return base


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("split.train.tp=3 nproc=3", "split.train.tp = 3 does not divide the 4 attention heads"),
        ("split.train.tp=2 nproc=3", "split.train: dp 1 x fsdp 1 x tp 2 = 2, but it has 3 ranks"),
        ("split.train.pp=8 nproc=8", "split.train.pp = 8 is more than the model's 4 layers"),
        ("split.train.pp=4 chunks=2", "pp = 4 x trainer.backend.chunks = 2 does not divide"),
        ("chunks=2", "trainer.backend.chunks = 2 needs a pipeline: set split.train.pp"),
        ("split.train.ep=2", "split.train.ep = 2: the model has no experts"),
        ("split.train.ep=3 nproc=4", "split.train.ep = 3 does not divide the 4 ranks of a stage"),
        (
            "split.infer.tp=2 trainer.backend.layers=transformer_engine",
            "split.infer.tp = 2: transformer-engine's layers do not sum products as ranks",
        ),
        ("split.train.cp=4 nproc=4", "cp = 4 does not divide the 2 key-value heads, which local"),
        ("trainer.lora.rank=4", "backend.kind = 'megatron': expected 'fsdp2' with lora.rank"),
        ("trainer.optimizer.kind=muon", "optimizer.kind = 'muon': expected 'adamw' with backend"),
        ("trainer.optimizer.kind=adamw8bit", "optimizer.kind = 'adamw8bit': expected 'adamw' with"),
        ('trainer.freeze=["model.*"]', "freeze = ('model.*',): expected () with backend.kind ="),
        ("trainer.attention_split=128", "attention_split = 128: expected 0 with backend.kind ="),
        (
            "split.train.cp=2 kl.coef=0.1 split.reference.ranks=4 split.reference.cp=4",
            "split.reference.cp = 4 does not divide the 2 key-value heads of a layer",
        ),
        (
            "split.train.pp=2 algorithm=ppo critic.init=random",
            "the role 'critic' shares these ranks and has no such axis, so set "
            "split.critic.ranks to ranks of its own",
        ),
    ],
)
def test_what_a_megatron_trainer_cannot_do(
    words: str,
    sentence: str,
    launched: list[int],
    models: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In one sentence of the plan too, and without a process."""
    given = [f"--model={models / 'dense'}", "--trainer.backend.kind=megatron", "--nproc=4"]
    given += [f"--{word}" for word in words.replace("chunks", "trainer.backend.chunks").split()]
    assert run(*given) == 2
    assert sentence in (said := capfd.readouterr().err)
    assert said.count("\n") == 1
    planned = ["plan", "grpo", f"--data={EXAMPLE / 'train.jsonl'}", *given]
    assert run_guarded(dispatch, planned) == 2
    assert capfd.readouterr().err == said
    assert launched == []


def test_what_a_megatron_trainer_can_do(launched: list[int], models: Path) -> None:
    given = (f"--model={models / 'dense'}", "--trainer.backend.kind=megatron", "--nproc=4")
    assert run(*given, "--split.train.tp=2", "--split.train.pp=2") == 0
    own = ("--split.train.ranks=2", "--split.infer.ranks=1", "--split.reference.ranks=1")
    assert run(*given, "--split.train.tp=2", *own, "--kl.coef=0.1", "--run.name=r-2") == 0
    assert launched == [4, 4]


def test_a_mixture_of_experts_that_cannot_be_cut(
    launched: list[int], models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [f"--model={models / 'mixture'}", "--trainer.backend.kind=megatron"]
    words = {
        "--nproc=3 --split.train.ep=3": "split.train.ep = 3 does not divide the model's 4 experts",
        "--nproc=2 --split.train.tp=2": "tp = 2 with experts needs trainer.backend.sequence",
    }
    for word, sentence in words.items():
        planned = ["plan", "sft", f"--data={EXAMPLE / 'train.jsonl'}", *given, *word.split()]
        assert run_guarded(dispatch, planned) == 2
        assert sentence in capfd.readouterr().err
    assert run(*given, "--nproc=2", "--split.train.ep=2") == 2
    said = capfd.readouterr().err
    assert "'megatron' trains only in recipes without an engine, such as sft" in said
    assert launched == []
    assert run(given[0], "--nproc=2") == 0
    assert launched == [2]


@pytest.mark.parametrize(
    ("host", "word", "remedy"),
    [
        ("float32", "trainer.dtype=bfloat16", "set engine.dtype = 'bfloat16' too"),
        ("float32", "engine.dtype=bfloat16", "set trainer.dtype = 'bfloat16' too"),
        ("bfloat16", "trainer.dtype=float32", "set engine.dtype = 'float32' too"),
        ("float32", "trainer.attention_split=2048", "set engine.attention_split = 2048 too"),
    ],
)
def test_numbers_of_which_trainer_and_engine_have_other_bits(
    host: str,
    word: str,
    remedy: str,
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "_dtype_of_host", lambda: host)
    assert run(f"--{word}") == 2
    said = capfd.readouterr().err
    assert remedy in said
    assert said.count("\n") == 1
    assert not Path("runs").exists()
    assert launched == []
    other = word.replace("trainer", "infer").replace("engine", "trainer").replace("infer", "engine")
    assert run(f"--{word}", f"--{other}") == 0
    assert run(f"--{word}", "--run.exact=false", "--run.name=r-2") == 0


def test_what_auto_means_may_be_said_for_one_role(
    launched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_dtype_of_host", lambda: "bfloat16")
    assert run("--trainer.dtype=bfloat16") == 0
    assert run("--engine.dtype=bfloat16", "--run.name=r-2") == 0
    assert launched == [1, 1]
