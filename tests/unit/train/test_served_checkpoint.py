"""Checkpoints that are served: the engine has their weights, and the run's settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.controller.run.checkpoints import Checkpoints, CheckpointState
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_tensors import as_rounded, coded_weights
from spmd_rl.model.lora import LoraConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.serve.command import settings_of
from spmd_rl.serve.served_model import ServedModel
from tests.dist.train_case import make_batch

CPU = torch.device("cpu")


def saved_run(trainer, folder: Path, settings: str) -> Path:
    """Make the folder of a run with checkpoints after steps 1 and 2."""
    saved = Checkpoints(folder / "checkpoints", 2, 0)
    for step in (1, 2):
        trainer.train_step(make_batch(step), grpo_loss)
        saved.save(CheckpointState(step, 0, 0.0), {})
        state = folder / f"checkpoints/step_{step:06d}/state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"roles": {"trainer": {}}}))
        trainer.save(str(state.with_name("trainer")))
        trainer.wait_until_saved()
        saved.wait_until_complete()
    (folder / "config.toml").write_text(settings)
    return folder


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_an_engine_has_the_weights_of_a_checkpoint(
    new_trainer, model_folder: Path, tmp_path: Path, lora: LoraConfig
) -> None:
    trainer = new_trainer(lora=lora)
    table = f'[trainer]\ninit = "random"\nseed = {trainer.cfg.seed}\n'
    run = saved_run(trainer, tmp_path / "run", f"model = {json.dumps(str(model_folder))}\n{table}")
    served = ServedModel.find(run)
    assert served.checkpoint == run / "checkpoints/step_000002/trainer"
    engine = served.engine(NativeEngineConfig(), CPU, str)
    assert engine.version == 2
    for name, one in engine.model.named_parameters():
        ours = trainer.backend.parameters[name]
        assert torch.equal(one, getattr(ours, "full_tensor", lambda ours=ours: ours)()), name
    older = ServedModel.find(run / "checkpoints/step_000001").engine(NativeEngineConfig(), CPU, str)
    assert older.version == 1
    theirs = dict(engine.model.named_parameters())
    same = (torch.equal(one, theirs[name]) for name, one in older.model.named_parameters())
    assert not all(same)


@pytest.mark.parametrize("weights", ["e4m3", "int4"])
@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)])
def test_an_engine_has_the_codes_of_a_checkpoint(
    new_trainer, model_folder: Path, tmp_path: Path, lora: LoraConfig, weights: WeightFormat
) -> None:
    trainer = new_trainer(lora=lora, weights=weights)
    table = f'[trainer]\ninit = "random"\nseed = {trainer.cfg.seed}\n'
    run = saved_run(trainer, tmp_path / "run", f"model = {json.dumps(str(model_folder))}\n{table}")
    engine = ServedModel.find(run).engine(NativeEngineConfig(weights=weights), CPU, str)
    held = {name: one.detach() for name, one in engine.model.named_parameters()}
    codes = coded_weights(held, engine.model.spec, weights)
    assert codes
    masters = {name: trainer.backend.gather(name) for name in trainer.backend.parameters}
    for name, master in as_rounded(masters.items(), engine.model.spec, weights):
        found = codes[name].decoded(torch.float32) if name in codes else held[name]
        assert torch.equal(found, master), name


def test_settings_are_those_of_the_run(new_trainer, model_folder: Path, tmp_path: Path) -> None:
    text = f"model = {json.dumps(str(model_folder))}\n[sampling]\ntemperature = 0.7\ntop_k = 5\n"
    text += '[engine]\nkind = "native"\nmax_batch = 7\n'
    run = str(saved_run(new_trainer(), tmp_path / "run", text))
    cfg, served = settings_of([run, "--sampling.top_k=3", "--step", "1"])
    assert (cfg.sampling.temperature, cfg.sampling.top_k, cfg.engine.max_batch) == (0.7, 3, 7)
    assert served.checkpoint is not None
    assert served.checkpoint.parent.name == "step_000001"
