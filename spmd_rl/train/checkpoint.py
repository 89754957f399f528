"""Checkpoints of a trainer, and exports. A folder appears under its name only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from spmd_rl.controller.checksums import check, checksums
from spmd_rl.controller.contracts import disagreement
from spmd_rl.errors import ConfigError, DiskError, SpmdError
from spmd_rl.mesh.place import Place
from spmd_rl.model.hf import save_folder
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.backend import Backend
from spmd_rl.train.learner import Progress

PROGRESS_FILE = "trainer.json"


class Writer(FileSystemWriter):
    """Lets the error of the system out: what torch raises about a full disk speaks of positions in an archive."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # of torch's archive, which cannot be closed once the system has failed
            of_system: BaseException | None = error
            while of_system is not None and not isinstance(of_system, OSError):
                of_system = of_system.__context__
            if of_system is None:
                raise
            raise of_system from None


class Saver:
    """Writes checkpoints beside the training: a step waits for a copy in memory, never for the disk.

    Every method is called by all ranks of the role. One checkpoint is written at a time, by a thread on each rank;
    these agree among themselves, in a process group of their own.
    """

    def __init__(self, backend: Backend, place: Place) -> None:
        self._backend = backend
        self._place = place
        self._group: ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._error: DiskError | None = None

    def start(self, folder: str, progress: Progress) -> None:
        """Copy weights, optimizer state and progress, and begin to write them to `folder`, which appears when whole.

        Blocks: until they are copied, and before that until the checkpoint before is written.
        """
        self.wait()
        target = Path(folder).absolute()  # a thread writes it, while others may change the directory
        if self._place.rank == 0:
            shutil.rmtree(_part(target), ignore_errors=True)
            _part(target).mkdir(parents=True)
        self._group = self._group or self._place.side_group()
        self._place.barrier()
        copies = {
            kind: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for kind, tensors in self._backend.state().items()
        }
        words = (target, copies, replace(progress))
        self._thread = threading.Thread(target=self._run, args=words, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Blocks: until the last checkpoint is written. Raises: DiskError when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises: DiskError when the last checkpoint could not be written, as far as that is known yet."""
        if self._error is not None:
            raise self._error

    def _run(self, target: Path, state: dict[str, Any], progress: Progress) -> None:
        try:
            self._write(target, state, progress)
        except (Exception, CheckpointException) as error:  # noqa: BLE001  whatever it is, the main thread raises it
            self._error = DiskError(f"cannot save {target}: {_cause(error)}; {_space(target)}")
            if self._place.rank == 0:
                shutil.rmtree(_part(target), ignore_errors=True)

    def _write(self, target: Path, state: dict[str, Any], progress: Progress) -> None:
        """The shards of every rank, then on one of them the progress and the name that makes the whole visible."""
        save_shards(state, storage_writer=Writer(_part(target)), process_group=self._group)
        if self._place.rank == 0:
            facts = {"progress": asdict(progress), "contract": self._backend.contract()}
            facts["checksums"] = checksums(_part(target))
            (_part(target) / PROGRESS_FILE).write_text(json.dumps(facts) + "\n")
            _replace(target, _part(target))


def load(folder: str, backend: Backend, place: Place) -> tuple[Progress, str]:
    """Fill the backend from a checkpoint, whatever number of ranks wrote it.

    The second result says how the numeric contract that it was written under differs from this one; mostly empty.
    Ranks: all of the role. Raises: ConfigError if there is no whole checkpoint at `folder`, or one of another version;
    SpmdError if a file of it has changed.
    """
    facts = _facts(Path(folder))
    check(Path(folder), facts.get("checksums", {}), place.rank, place.size)
    progress = Progress(**facts["progress"])
    load_shards(backend.state(), checkpoint_id=folder, process_group=place.group)
    backend.loaded(progress.optimizer_steps)
    return progress, disagreement({"the trainer": backend.contract(), "the checkpoint": facts["contract"]})


def saved_progress(folder: str | Path) -> Progress:
    """Of a checkpoint. Raises: as `load`."""
    return Progress(**_facts(Path(folder))["progress"])


def export_saved(folder: str | Path, like: str | Path, target: str | Path) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, float32, in this process alone.

    Raises: as `load`, and ConfigError where `like` is no model's folder.
    """
    check(Path(folder), _facts(Path(folder)).get("checksums", {}))
    shapes = ModelSpec.from_folder(like).parameter_shapes()
    weights = {name: torch.empty(shape) for name, shape in shapes.items()}
    with warnings.catch_warnings(action="ignore"):  # it says that there is one process
        load_shards({"model": weights}, checkpoint_id=folder, no_dist=True)
    save_folder(target, like, weights.items())


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


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / PROGRESS_FILE
    if not path.is_file():
        raise ConfigError(f"{folder} is not a trainer checkpoint: it has no {PROGRESS_FILE}")
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise SpmdError(f"{path} is not as it was written: {error}") from error
    if not {"progress", "contract"} <= facts.keys():
        raise ConfigError(f"{path} is of another version of spmd_rl: it lacks progress or contract")
    return facts


def _gathered(backend: Backend) -> Iterator[tuple[str, Tensor]]:
    for name in backend.held():
        yield name, backend.full(name)


def _part(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


def _replace(target: Path, part: Path) -> None:
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(part, target)
    shutil.rmtree(old, ignore_errors=True)


def _cause(error: BaseException) -> str:
    """The first rank's error in one line, without the traceback that comes with it."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank} of the role: {_cause(first)}"
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _space(target: Path) -> str:
    """How much room there is, which is why most writes fail."""
    return f"{shutil.disk_usage(target.parent).free / 2**20:,.0f} MiB are free there"
