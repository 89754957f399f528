"""Export of weights as a Hugging Face folder, from a live trainer or by `spmd-rl export`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.config.load import read_toml
from spmd_rl.controller.run.checkpoints import Checkpoints, best_first
from spmd_rl.controller.run.checksums import check
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import save_folder
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import Backend
from spmd_rl.train.checkpoint_index import INDEX_FILE, WEIGHTS, read_index
from spmd_rl.train.shards import ShardReader


def main(words: list[str]) -> int:
    """Export the checkpoint that `words` name, and print where it is."""
    options = _options(words)
    target = Path(options.target)
    if target.exists():
        raise ConfigError(f"{target} exists: name a folder that does not")
    run = Path(options.run)
    folder = _checkpoint(run, options.step, options.role)
    export_saved(folder, _model_folder(run, options.model), target, getattr(torch, options.dtype))
    print(f"{target} holds the weights of {folder}")
    return 0


def export_saved(
    folder: str | Path, like: str | Path, target: str | Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, one tensor at a time.

    Config and tokenizer come from the folder `like`.
    Raises: as `checkpoint.load`, and ConfigError where `like` is no model folder, or another's.
    """
    path = Path(folder)
    index = read_index(path)
    weights = index.tensors[WEIGHTS]
    files = {shard.file for tensor in weights.values() for shard in tensor.shards}
    check(path, {file: index.files[file] for file in files})
    shapes = ModelSpec.from_folder(like).parameter_shapes()
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise ConfigError(
            f"{folder} holds the weights of another model than the config.json in {like}"
        )
    with ShardReader(path, index) as reader:
        save_folder(target, like, ((name, reader.whole(WEIGHTS, name)) for name in shapes), dtype)


def export_hf(folder: str, like: str, backend: Backend, context: RoleContext, dtype: str) -> None:
    """Write a trainer's weights as a Hugging Face folder, gathering one tensor at a time.

    Config and tokenizer come from the folder `like`.
    Ranks: all of the role. Blocks: until the folder is written.
    """
    tensors = _gathered(backend)
    try:
        if context.rank == 0:
            save_folder(folder, like, tensors, dtype=getattr(torch, dtype))
    finally:
        # The other ranks gather every tensor, so this rank must too, even if its disk is full.
        for _ in tensors:
            pass
    context.barrier()


def _gathered(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    for name in backend.local_weights():
        yield name, backend.gather(name)


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="spmd-rl export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument(
        "--step", help="the checkpoint after this step, or `best`; default: the newest"
    )
    parser.add_argument("--role", help="which trainer to export, if a checkpoint holds several")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="default: float32"
    )
    parser.add_argument(
        "--model", help="folder of config and tokenizer; default: the model of the run"
    )
    return parser.parse_args(words)


def _checkpoint(run: Path, step: str | None, role: str | None) -> Path:
    """Return a trainer's folder in a checkpoint.

    Raises: ConfigError unless there is exactly one.
    """
    saved = Checkpoints(run / "checkpoints", 1, 0).saved()
    named = {str(record.next_step): path for path, record in saved.items()}
    if best := best_first(saved):
        named["best"] = best[0]
    chosen = named.get(step) if step else next(reversed(saved), None)
    if chosen is None:
        raise ConfigError(
            f"no checkpoint {step or ''} in {run}: there are {', '.join(named) or 'none'}"
        )
    trainers = {file.parent.name: file.parent for file in sorted(chosen.glob(f"*/{INDEX_FILE}"))}
    if not role and len(trainers) == 1:
        return next(iter(trainers.values()))
    if role not in trainers:
        raise ConfigError(
            f"{chosen} holds the trainers {', '.join(trainers) or 'none'}: name one with --role"
        )
    return trainers[role]


def _model_folder(run: Path, option: str | None) -> Path:
    """Return the folder of config and tokenizer: the option's, or that of the run's settings.

    Raises: ConfigError where neither names one.
    """
    settings: dict[str, Any] = (
        read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
    )
    model = option or settings.get("model")
    if not model:
        raise ConfigError(
            f"{run}/config.toml does not name the model: name its folder with --model"
        )
    return Path(model)
