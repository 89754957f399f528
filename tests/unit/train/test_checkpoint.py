from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.train import checkpoint
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.role import Trainer
from tests.dist.train_case import make_batch


def _same_weights(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(one.local, b.weight_source()[name].local) for name, one in a.weight_source().items())


def test_a_resumed_run_goes_on_bit_for_bit(new_trainer, tmp_path: Path) -> None:
    schedule = {"schedule": "cosine", "warmup_steps": 1, "total_steps": 6}
    whole, resumed = new_trainer(**schedule), new_trainer(seed=7, **schedule)
    for seed in range(2):
        whole.train_step(make_batch(seed), grpo_loss)
    whole.save(str(tmp_path / "step_2"))
    assert not _same_weights(whole, resumed)
    assert resumed.load(str(tmp_path / "step_2")) == 2
    assert _same_weights(whole, resumed)
    for seed in range(2, 4):
        ours, theirs = (one.train_step(make_batch(seed), grpo_loss) for one in (whole, resumed))
        del ours["perf/train_tokens_per_s"], theirs["perf/train_tokens_per_s"]
        assert ours == theirs
    assert _same_weights(whole, resumed)


def test_a_checkpoint_appears_whole_or_not_at_all(new_trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = new_trainer()
    folder = tmp_path / "step_0"
    trainer.save(str(folder))
    trainer.train_step(make_batch(), grpo_loss)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_shards", full_disk)
        with pytest.raises(OSError, match="no space"):
            trainer.save(str(folder))
    assert new_trainer().load(str(folder)) == 0
    trainer.save(str(folder))
    assert new_trainer().load(str(folder)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_0"]


def test_a_folder_without_a_whole_checkpoint_is_refused(new_trainer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_9 is not a trainer checkpoint"):
        new_trainer().load(str(tmp_path / "step_9"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_as_a_model_folder(new_trainer, place, tmp_path: Path, dtype: str) -> None:
    trainer = new_trainer()
    trainer.train_step(make_batch(), grpo_loss)
    trainer.export_hf(str(tmp_path / "hf"), dtype)
    loaded = Trainer(TrainerConfig(model=str(tmp_path / "hf")), place).weight_source()
    for name, one in trainer.weight_source().items():
        expected = one.local.detach().to(getattr(torch, dtype)).float()
        assert torch.equal(loaded[name].local, expected)


def test_a_trainer_needs_a_model(place) -> None:
    with pytest.raises(ConfigError, match=r"trainer.model is empty"):
        Trainer(TrainerConfig(), place)
