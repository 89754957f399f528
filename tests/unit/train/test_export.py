"""`spmd-rl export`: a Hugging Face folder of any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.controller.run.checkpoints import Checkpoints, CheckpointState
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.train.command import main
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import make_batch


@pytest.fixture
def run(new_trainer, model_folder: Path, tmp_path: Path) -> tuple[Path, Trainer]:
    """The folder of a run with checkpoints after steps 1 and 2, and the trainer as it is after step
    2.
    """
    trainer, folder = new_trainer(), tmp_path / "run"
    saved = Checkpoints(folder / "checkpoints", 2, 0)
    for step, reward in ((1, 0.9), (2, 0.1)):
        trainer.train_step(make_batch(step), grpo_loss)
        saved.save(CheckpointState(step, 0, reward), {})
        state = folder / f"checkpoints/step_{step:06d}/state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"roles": {"trainer": {}}}))
        trainer.save(str(state.with_name("trainer")))
        trainer.wait_until_saved()
        saved.wait_until_complete()
    (folder / "config.toml").write_text(f"model = {json.dumps(str(model_folder))}\n")
    return folder, trainer


def exported(target: Path) -> dict[str, torch.Tensor]:
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_newest_checkpoint_is_exported(
    run: tuple[Path, Trainer], tmp_path: Path, capsys, dtype: str
) -> None:
    folder, trainer = run
    target = tmp_path / "hf"
    assert main([str(folder), str(target), f"--dtype={dtype}"]) == 0
    assert (
        capsys.readouterr().out
        == f"{target} holds the weights of {folder}/checkpoints/step_000002/trainer\n"
    )
    trainer.export_hf(str(tmp_path / "live"), dtype)
    theirs = exported(tmp_path / "live")
    ours = exported(target)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    assert sorted(one.name for one in target.iterdir()) == sorted(
        one.name for one in (tmp_path / "live").iterdir()
    )


@pytest.mark.parametrize("step", ["1", "best"])
def test_an_earlier_one_is_exported(run: tuple[Path, Trainer], tmp_path: Path, step: str) -> None:
    folder, trainer = run
    main([str(folder), str(tmp_path / "hf"), "--step", step])
    trainer.load(str(folder / "checkpoints/step_000001/trainer"))
    trainer.export_hf(str(tmp_path / "live"))
    assert all(
        torch.equal(one, exported(tmp_path / "live")[name])
        for name, one in exported(tmp_path / "hf").items()
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--step=7"], r"no checkpoint 7 in .*run: there are 1, 2, best"),
        (["--role=critic"], r"step_000002 holds the trainers trainer: name one with --role"),
        (["--model={tmp}"], r"is not a model folder: it has no config.json"),
    ],
)
def test_what_is_not_there_is_named(
    run: tuple[Path, Trainer], tmp_path: Path, words: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        main([str(run[0]), str(tmp_path / "hf"), *(word.format(tmp=tmp_path) for word in words)])
    assert not (tmp_path / "hf").exists()


def test_a_folder_that_exists_is_not_written_over(
    run: tuple[Path, Trainer], tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    with pytest.raises(ConfigError, match="hf exists: name a folder that does not"):
        main([str(run[0]), str(tmp_path / "hf")])


def test_the_config_of_another_model_is_refused(
    run: tuple[Path, Trainer], model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    config = json.loads((model_folder / "config.json").read_text())
    (tmp_path / "other/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(
        ConfigError, match="holds the weights of another model than the config.json in"
    ):
        main([str(run[0]), str(tmp_path / "hf"), f"--model={tmp_path / 'other'}"])


def test_a_run_that_names_no_model_needs_one(run: tuple[Path, Trainer], tmp_path: Path) -> None:
    (run[0] / "config.toml").write_text("")
    with pytest.raises(
        ConfigError, match="config.toml does not name the model: name its folder with --model"
    ):
        main([str(run[0]), str(tmp_path / "hf")])


def test_a_relative_model_is_looked_for_where_the_run_was_started(
    run: tuple[Path, Trainer], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = run
    (folder / "config.toml").write_text(f'model = "{model_folder.name}"\n')
    (folder / "run.json").write_text(json.dumps({"folder": str(model_folder.parent)}))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "hf"]) == 0
    monkeypatch.chdir(model_folder.parent)
    (folder / "run.json").unlink()  # then it is a path from here
    assert main([str(folder), str(tmp_path / "other")]) == 0
    assert exported(tmp_path / "hf").keys() == exported(tmp_path / "other").keys()
    (folder / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run.json"):
        main([str(folder), str(tmp_path / "third")])
