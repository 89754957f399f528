"""`spmd-rl export`: write the weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config.load import read_toml
from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.controller.run.evaluations import best_of_run
from spmd_rl.errors import ConfigError
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE
from spmd_rl.train.checkpoint.export import export_saved


def main(words: list[str]) -> int:
    """Write the weights of a run's checkpoint, as `words` ask, and print where they are."""
    options = _options(words)
    target = Path(options.target)
    if target.exists():
        raise ConfigError(f"{target} exists: name a folder that does not")
    run = Path(options.run)
    folder = _trainer(_checkpoint(run, options.step), options.role)
    export_saved(folder, _model(run, options.model), target, getattr(torch, options.dtype))
    print(f"{target} holds the weights of {folder}")
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spmd-rl export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument(
        "--step", help="export the checkpoint after this step, or `best` (default: the newest)"
    )
    parser.add_argument("--role", help="the trainer to export, where a checkpoint holds several")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="default: float32"
    )
    parser.add_argument(
        "--model", help="where config and tokenizer come from (default: the model of the run)"
    )
    return parser.parse_args(words)


def _checkpoint(run: Path, step: str | None) -> Path:
    """The folder of a checkpoint, by default the newest. Raises: ConfigError where none is."""
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


def _trainer(checkpoint: Path, role: str | None) -> Path:
    """The folder of a trainer. Raises: ConfigError where there is none, or more than one."""
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


def _model(run: Path, given: str | None) -> Path:
    """Where config and tokenizer come from. Raises: ConfigError where nothing says it."""
    settings: dict[str, Any] = (
        read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
    )
    model = given or settings.get("model")
    if not model:
        raise ConfigError(
            f"{run}/config.toml does not name the model: name its folder with --model"
        )
    return Path(model)
