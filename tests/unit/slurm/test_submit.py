"""`spmd-rl submit`: its arguments become a job, or one sentence that refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.config.dump import dump_toml
from spmd_rl.controller.run.recipe import Invocation, load_recipe
from spmd_rl.errors import ConfigError, DataError, PlanError
from spmd_rl.slurm.command import _parser, main

RECIPE = str(Path(__file__).parents[3] / "examples/own_role/word_count.py")
EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def stand_in(folder: Path, text: str) -> None:
    """A program to find as sbatch."""
    (folder / "sbatch").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "sbatch").chmod(0o755)


def test_a_dry_run_prints_the_script_and_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--text=a b",
        "--nodes=4",
        "--time=1:00:00",
        "--gpus-per-node=8",
        "--slurm=--exclusive",
        "--slurm=--mem=0",
    ]
    assert main([RECIPE, *words, "--no-requeue", "--dry-run"]) == 0
    script = capsys.readouterr().out.splitlines()
    for option in (
        "nodes=4",
        "time=1:00:00",
        "gpus-per-node=8",
        "exclusive",
        "mem=0",
        "no-requeue",
        "job-name=word_count",
    ):
        assert f"#SBATCH --{option}" in script
    assert f"folder={elsewhere}/runs/word_count" in script
    assert "nproc=8" in script
    assert f"set -- {RECIPE} '--text=a b'" in script
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "nproc"),
    [
        ([], ""),
        (["--nproc=3"], "3"),
        (["--gpus-per-node=4"], "4"),
        (["--gpus-per-node=4", "--nproc-per-node=2"], "2"),
    ],
)
def test_ranks_a_node(words: list[str], nproc: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([RECIPE, "--dry-run", *words])
    assert f"\nnproc={nproc}\n" in capsys.readouterr().out


def test_a_folder_with_a_run_is_told(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = EXAMPLE / "model", EXAMPLE / "train.jsonl"
    words = ["grpo", f"--model={model}", f"--data={data}", "--trainer.init=random", "--dry-run"]
    assert main([*words, "--steps=3"]) == 0
    assert capsys.readouterr().err == ""
    invocation = Invocation.parse([*words[:-1], "--steps=3"])
    folder = elsewhere / "runs/grpo"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(load_recipe("grpo").configure(invocation)))
    rows = ['{"step": 1, "unix_s": 1.0}\n', '{"step": 2, "unix_s": 2.0}\n']
    (folder / "metrics.jsonl").write_text("".join(rows))
    assert main([*words, "--steps=3"]) == 0
    told = capsys.readouterr()
    goes_on = "runs/grpo holds this run up to step 2: the job goes on from its newest checkpoint\n"
    assert told.err == goes_on
    assert told.out.startswith("#!")
    (folder / "metrics.jsonl").write_text("".join([*rows, '{"step": 3, "unix_s": 3.0}\n']))
    assert main([*words, "--steps=3"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith(
        "runs/grpo holds this run up to step 3, which is its last: the job would train nothing; add"
    )
    with pytest.raises(ConfigError, match="holds a run with another configuration"):
        main([*words, "--steps=3", "--trainer.lr=1"])


def test_what_slurm_gets_is_the_dry_run(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(elsewhere, f"cat >{elsewhere}/given; echo '12;cluster'")
    main([RECIPE, "--dry-run"])
    shown = capsys.readouterr().out
    assert main([RECIPE]) == 0
    assert (elsewhere / "given").read_text() == shown
    assert f"job 12: {elsewhere}/runs/word_count/logs/slurm_12.log" in capsys.readouterr().out
    assert (elsewhere / "runs/word_count/logs").is_dir()
    assert (elsewhere / "runs/word_count").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([RECIPE, "--txt=x"], "text"),
        (["no_such_recipe"], "no recipe 'no_such_recipe'"),
        ([RECIPE, "--nodes=two"], "--nodes"),
        ([RECIPE, "--slurm=exclusive"], "--slurm=--exclusive"),
        ([RECIPE, "--slurm=--nodes=5"], "--slurm=--nodes=5: .*write --nodes=5"),
        ([RECIPE, "--slurm=--no-requeue"], "write --no-requeue"),
        ([RECIPE, "--slurm=--exclusive\ntouch here"], "--slurm=--exclusive"),
        ([RECIPE, "--partition=a\nb"], "--partition"),
        ([RECIPE, "--nodes=0"], "--nodes=0: expected 1 or more"),
        ([RECIPE, "--gpus-per-node=-2"], "--gpus-per-node=-2: expected 1 or more"),
        ([RECIPE, "--max-restarts=-1"], "--max-restarts=-1: expected 0 or more"),
    ],
)
def test_bad_words_are_refused_in_one_sentence(
    elsewhere: Path, words: list[str], sentence: str
) -> None:
    stand_in(elsewhere, "exit 99")
    with pytest.raises(ConfigError, match=sentence):
        main(words)
    assert not (elsewhere / "runs").exists()


def test_a_split_that_needs_more_ranks_than_the_nodes_have_does_not_queue() -> None:
    words = [
        f"--model={EXAMPLE / 'model'}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        "--split.train.ranks=9",
    ]
    words.append("--trainer.init=random")
    with pytest.raises(PlanError, match=r"asks for 9 ranks \(train 9\), and the world has 8"):
        main(["grpo", *words, "--nodes=2", "--nproc-per-node=4", "--dry-run"])


def test_input_that_does_not_serve_does_not_queue() -> None:
    words = [
        "grpo",
        f"--model={EXAMPLE / 'model'}",
        f"--data={EXAMPLE / 'train.jsonl'}",
        "--dry-run",
    ]
    with pytest.raises(ConfigError, match="holds no weights"):
        main(words)
    with pytest.raises(DataError, match=r"train\.jsonl:1: question: no such key"):
        main([*words, "--trainer.init=random", "--prompts.prompt_key=question"])


def test_slurms_own_refusal_is_passed_on(elsewhere: Path) -> None:
    stand_in(elsewhere, "echo 'sbatch: error: invalid account' >&2; exit 1")
    with pytest.raises(ConfigError, match="Slurm refused the job: sbatch: error: invalid account"):
        main([RECIPE])


def test_without_sbatch_it_says_so(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(ConfigError, match="sbatch is not installed here"):
        main([RECIPE])


def test_help_tells_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "--gpus-per-node" in capsys.readouterr().out
    assert main([]) == 2


@settings(max_examples=100)
@given(st.lists(st.from_regex(r"--(?!nodes|time|help)[a-z]+\.[a-z]+(=[^\0]*)?", fullmatch=True)))
def test_what_is_not_slurms_goes_to_the_run_unchanged_and_in_order(words: list[str]) -> None:
    asked, rest = _parser().parse_known_args(["recipe.py", *words, "--nodes=3"])
    assert rest == ["recipe.py", *words]
    assert asked.nodes == 3
