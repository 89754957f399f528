"""Saved weights of a run: which checkpoint, which trainer in it, and the model that they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.config.load import read_toml
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.controller.run.evaluations import best_of_run
from spmd_rl.errors import ConfigError
from spmd_rl.model.foreign.names import folder_of, named_like
from spmd_rl.observe.jsonl import read_object
from spmd_rl.observe.provenance import PROVENANCE_FILE
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE


def named_run(path: Path) -> tuple[Path, Path | None] | None:
    """Return the run that a path names and, if it names one, the checkpoint; None for a model.

    Raises: ConfigError where it names none of them.
    """
    if (folder_of(path) / "config.json").is_file():
        return None
    if path.parent.name == "checkpoints" and path.is_dir():
        return path.parent.parent, path
    if (path / "config.toml").is_file() or (path / "checkpoints").is_dir():
        return path, None
    raise ConfigError(
        f"{path} is neither a model folder, which has a config.json, nor a run, which has a "
        f"config.toml and checkpoints{did_you_mean_path(path)}"
    )


def has_begun(run: Path) -> bool:
    """Return whether this is the folder of a run, and not one that only holds a config.toml."""
    return any((run / name).exists() for name in ("plan.json", "checkpoints"))


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
            f"{did_you_mean_path(run)}"
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


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings of a run; none where its folder does not have them."""
    file = run / "config.toml"
    return read_toml(file) if file.is_file() else {}


def random_seed(settings: Mapping[str, Any]) -> int | None:
    """Return the seed of a run's first weights if they were random; None: they are the folder's."""
    trainer = settings.get("trainer", {})
    return int(trainer.get("seed", 0)) if trainer.get("init") == "random" else None


def model_of(run: Path, given: str | None) -> Path:
    """Return where config and tokenizer come from. Raises: ConfigError where nothing says it.

    A relative path in the run's settings begins where the run was started.
    """
    model = given or settings_of(run).get("model")
    if not model:
        raise ConfigError(
            f"{run}/config.toml does not name the model: name its folder with --model"
        )
    file = run / PROVENANCE_FILE
    started = "" if given or not file.is_file() else read_object(file).get("folder")
    there = Path(str(started or ""), folder_of(model))
    return named_like(model, there) if there.is_dir() else Path(model)
