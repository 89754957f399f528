"""Checkpoints of a trainer, and exports. A folder appears under its name only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.place import Place
from spmd_rl.model.hf import save_folder
from spmd_rl.train.backend import Backend
from spmd_rl.train.learner import Progress

PROGRESS_FILE = "trainer.json"


def save(folder: str, backend: Backend, progress: Progress, place: Place) -> None:
    """Write weights, optimizer state and progress, sharded, then rename the whole into place.

    Ranks: all of the role. Blocks: until every rank has written.
    """
    target = Path(folder)
    part = target.with_name(f".{target.name}.part")
    if place.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    place.barrier()
    save_shards(backend.state(), checkpoint_id=part, process_group=place.group)
    if place.rank == 0:
        (part / PROGRESS_FILE).write_text(json.dumps(vars(progress)) + "\n")
        _replace(target, part)
    place.barrier()


def load(folder: str, backend: Backend, place: Place) -> Progress:
    """Fill the backend from a checkpoint, whatever number of ranks wrote it.

    Ranks: all of the role. Raises: ConfigError if there is no whole checkpoint at `folder`.
    """
    path = Path(folder) / PROGRESS_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} is not a trainer checkpoint: it has no {PROGRESS_FILE}")
    progress = Progress(**json.loads(path.read_text()))
    load_shards(backend.state(), checkpoint_id=folder, process_group=place.group)
    backend.loaded(progress.optimizer_steps)
    return progress


def export_hf(folder: str, like: str, backend: Backend, place: Place, dtype: str) -> None:
    """Write a Hugging Face folder, gathering one tensor at a time; config and tokenizer come from `like`.

    Ranks: all of the role. Blocks: until the folder is written.
    """
    tensors = _gathered(backend)
    try:
        if place.rank == 0:
            save_folder(folder, like, tensors, dtype=getattr(torch, dtype))
    finally:
        # The other ranks gather every tensor, so this one must too, even after a full disk.
        for _ in tensors:
            pass
    place.barrier()


def _gathered(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    for name in backend.held():
        yield name, backend.full(name)


def _replace(target: Path, part: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)
