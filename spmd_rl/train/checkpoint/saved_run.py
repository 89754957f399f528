"""Saved weights of a run: which checkpoint, which trainer in it, and the model that they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd_rl.config.load import read_toml
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.controller.run.evaluations import best_of_run
from spmd_rl.errors import ConfigError
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE


def checkpoint_of(run: Path, step: str | None) -> Path:
    """Return the folder of a checkpoint, by default the newest.

    `step` is the number of steps before it, or "best". Raises: ConfigError where there is none.
    """
    saved = Checkpoints(run / "checkpoints", 1, 0).complete()
    named = {str(record.next_step): path for path, record in saved.items()}
    if best := best_of_run(run, saved):
        named["best"] = best[0]
    chosen = named.get(step) if step else next(reversed(saved), None)
    if chosen is None:
        raise ConfigError(
            f"no checkpoint {step or ''} in {run}: there are {', '.join(named) or 'none'}"
        )
    return chosen


def trainer_of(checkpoint: Path, role: str | None) -> Path:
    """Return the folder of a trainer. Raises: ConfigError where there is none, or more than one."""
    trainers = {
        file.parent.name: file.parent for file in sorted(checkpoint.glob(f"*/{INDEX_FILE}"))
    }
    if not role and len(trainers) == 1:
        return next(iter(trainers.values()))
    if role not in trainers:
        raise ConfigError(
            f"{checkpoint} holds the trainers {', '.join(trainers) or 'none'}: name one with --role"
        )
    return trainers[role]


def model_of(run: Path, given: str | None) -> Path:
    """Return where config and tokenizer come from. Raises: ConfigError where nothing says it."""
    settings: dict[str, Any] = (
        read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
    )
    model = given or settings.get("model")
    if not model:
        raise ConfigError(
            f"{run}/config.toml does not name the model: name its folder with --model"
        )
    return Path(model)
