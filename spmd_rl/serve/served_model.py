"""Model that is served: a Hugging Face folder, or a checkpoint of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.model.formats.coded_tensors import as_codes
from spmd_rl.model.hf import fill
from spmd_rl.model.lora import AdaptedBase
from spmd_rl.model.parts.part import row_shards_of_run
from spmd_rl.rollout.native.build import build
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.train.checkpoint.export import saved_weights
from spmd_rl.train.checkpoint.saved_run import (
    checkpoint_of,
    model_of,
    named_run,
    random_seed,
    settings_of,
    trainer_of,
)


@dataclass(frozen=True)
class ServedModel:
    """`folder` has config and tokenizer, and the weights too unless `checkpoint` has them.

    `checkpoint` is the folder of a trainer, and `settings` are those of its run.
    """

    folder: Path
    checkpoint: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def find(path: Path, step: str = "", role: str = "", model: str = "") -> ServedModel:
        """Return what a path names: a model folder, a run, or one of its checkpoints.

        Raises: ConfigError where it is none of them, or its checkpoint is missing.
        """
        named = named_run(path)
        if named is None:
            if step or role:
                raise ConfigError(f"{path} is a model folder: step and role are those of a run")
            return ServedModel(path)
        run, checkpoint = named
        trainer = trainer_of(checkpoint or checkpoint_of(run, step), role)
        return ServedModel(model_of(run, model), trainer, settings_of(run))

    def own_settings(self) -> dict[str, Any]:
        """Return the sampling and the native engine of the run, as settings of a server."""
        engine = self.settings.get("engine", {})
        found = {"engine": engine} if engine.get("kind", "native") == "native" else {}
        sampling = self.settings.get("sampling")
        return found | ({"sampling": sampling} if sampling is not None else {})

    def engine(
        self,
        cfg: NativeEngineConfig,
        device: torch.device,
        decode: Callable[[tuple[int, ...]], str],
    ) -> NativeEngine:
        """Return an engine with the weights.

        Raises: ConfigError where there are none that generate text, or the folder does not serve.
        """
        folder = str(self.folder)
        if self.checkpoint is None:
            engine = build(replace(cfg, load_weights=True), folder, device, decode)
            if engine.version is None:
                raise ConfigError(f"{self.folder} holds no weights")
            return engine
        with saved_weights(self.checkpoint, self.folder) as weights:
            if weights.head != "lm":
                raise ConfigError(f"{self.checkpoint} holds a value model, which draws no tokens")
            seed = random_seed(self.settings)
            adapted = AdaptedBase(weights.lora, seed) if weights.lora.rank else None
            own = replace(cfg, load_weights=False)
            shards = row_shards_of_run(self.settings)
            engine = build(own, folder, device, decode, adapted=adapted, row_shards=shards)
            fill(engine.model, as_codes(weights.tensors, engine.model.spec, cfg.weights))
            engine.sink().commit(weights.version)
        return engine
