"""The Trainer role: a model on some ranks of the world, and what the controller may ask of it."""

from __future__ import annotations

from typing import Literal

import torch

from spmd_rl.algo.batch import Scores
from spmd_rl.algo.losses import Loss
from spmd_rl.controller.endpoint import Role, Sharded, collective
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.place import Place
from spmd_rl.model.hf import init_weights, load_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train import checkpoint
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2 import Fsdp2
from spmd_rl.train.learner import Learner
from spmd_rl.types import Batch
from spmd_rl.weights.held import Held


class Trainer(Role):
    """Learns from batches. Its version counts the train steps taken, from 0."""

    def __init__(self, cfg: TrainerConfig, place: Place) -> None:
        super().__init__(cfg, place)
        self.cfg: TrainerConfig = cfg
        self.backend = Fsdp2(_model(cfg), place.mesh, cfg, place.device)
        self.learner = Learner(self.backend, place, cfg)

    @collective
    def train_step(self, batch: Sharded[Batch], loss: Loss, lr: float | None = None) -> dict[str, float]:
        """Take the optimizer steps for one batch and raise the version by one; `lr` overrides the schedule's rate."""
        return self.learner.train_step(batch, loss, lr)

    @collective
    def score(self, batch: Sharded[Batch]) -> Sharded[Scores]:
        """Log-probabilities of the batch's tokens under the current weights."""
        return Scores(self.learner.score(batch), batch.lengths, batch.index)

    @collective
    def version(self) -> int:
        return self.learner.progress.version

    @collective
    def save(self, folder: str) -> None:
        """Write a checkpoint to resume from."""
        checkpoint.save(folder, self.backend, self.learner.progress, self.place)

    @collective
    def load(self, folder: str) -> int:
        """Resume from a checkpoint, written by any number of ranks; returns its version."""
        self.learner.progress = checkpoint.load(folder, self.backend, self.place)
        return self.learner.progress.version

    @collective
    def export_hf(self, folder: str, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        """Write a folder that `transformers` loads, with the config and tokenizer of the model trained from."""
        checkpoint.export_hf(folder, self.cfg.model, self.backend, self.place, getattr(torch, dtype))

    def on_pushed(self, version: int) -> None:
        """The weights that were just pushed are `version`, here as at the engine."""
        self.learner.progress.version = version

    def weight_source(self) -> Held:
        """This rank's share of the master weights, updated in place by every train step."""
        return self.backend.held()


def _model(cfg: TrainerConfig) -> CausalLM:
    if not cfg.model:
        raise ConfigError("trainer.model is empty: name a Hugging Face model folder")
    spec = ModelSpec.from_folder(cfg.model)
    model = CausalLM(spec)
    if cfg.init == "random":
        init_weights(model, spec, cfg.seed)
    else:
        load_weights(model, cfg.model)
    return model
