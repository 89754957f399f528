"""Checkpoints of a trainer. A folder appears under its name only when it is whole.

checkpoint_index.py says what a checkpoint's folder holds. Nothing in it is code: it is safetensors
files, and an index in JSON with a closed schema.
"""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.controller.contracts import disagreement
from spmd_rl.controller.run.checksums import check
from spmd_rl.errors import ConfigError, DiskError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.observe import atomic_write
from spmd_rl.train.backend import Backend, State
from spmd_rl.train.checkpoint_index import (
    INDEX_FILE,
    WEIGHTS,
    Index,
    Pieces,
    Written,
    merged,
    read_index,
    share,
)
from spmd_rl.train.progress import TrainerState
from spmd_rl.train.shards import ShardReader, write_shards
from spmd_rl.weights.layout import Piece

NO_OPTIMIZER = "the checkpoint holds no optimizer state, and AdamW begins anew"


class CheckpointWriter:
    """Writes checkpoints beside the training: a step waits for a copy in memory, never for the
    disk.

    Without `optimizer` they hold the weights alone. Every method is called by all ranks of the
    role. One checkpoint is written at a time, by a thread on each rank; these agree among
    themselves, in a process group of their own.
    """

    def __init__(self, backend: Backend, context: RoleContext, optimizer: bool = True) -> None:
        self._backend = backend
        self._place = context
        self._optimizer = optimizer
        self._group: ProcessGroup | None = None
        self._layouts: list[Pieces] = []  # of all ranks; they never change
        self._thread: threading.Thread | None = None
        self._error: DiskError | None = None

    def start(self, folder: str, progress: TrainerState) -> None:
        """Copy weights, optimizer state and progress, and begin to write them to `folder`, which
        appears when whole.

        Blocks: until they are copied, and before that until the checkpoint before is written.
        """
        self.wait()
        # a thread writes it, while others may change the directory
        target = Path(folder).absolute()
        if self._place.rank == 0:
            atomic_write.begin_folder(target)
        self._group = self._group or self._place.side_group()
        self._place.barrier()  # the folder is there
        state = self._state()
        self._layouts = self._layouts or self._agree_on_layouts(state)
        copies = {
            kind: [(name, replace(one, local=_copied(one.local))) for name, one in pieces]
            for kind, pieces in self._share_of(state).items()
        }
        words = (target, copies, copy.copy(progress))
        self._thread = threading.Thread(
            target=self._run, args=words, name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Blocks: until the last checkpoint is written. Raises: DiskError when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raises: DiskError when the last checkpoint could not be written, as far as that is known
        yet.
        """
        if self._error is not None:
            raise self._error

    def _state(self) -> State:
        state = self._backend.state()
        return state if self._optimizer else {WEIGHTS: state[WEIGHTS]}

    def _agree_on_layouts(self, state: State) -> list[Pieces]:
        """What every rank holds."""
        ours = {
            kind: [Piece(name, one.shape, one.dtype, one.box) for name, one in pieces]
            for kind, pieces in state.items()
        }
        blobs = self._place.all_gather_bytes(msgspec.msgpack.encode(ours), self._group)
        return [msgspec.msgpack.decode(blob, type=dict[str, list[Piece]]) for blob in blobs]

    def _share_of(self, state: State) -> State:
        """What this rank writes of what it holds."""
        mine = share(self._layouts, self._place.rank)
        return {
            kind: [state[kind][position] for position in positions]
            for kind, positions in mine.items()
        }

    def _run(self, target: Path, copies: State, progress: TrainerState) -> None:
        try:
            self._write(target, copies, progress)
        except Exception as error:  # noqa: BLE001  whatever it is, the main thread raises it
            self._error = DiskError(f"cannot save {target}: {error}; {_space(target)}")
            if self._place.rank == 0:
                atomic_write.remove_folder(atomic_write.part_folder(target))

    def _write(self, target: Path, copies: State, progress: TrainerState) -> None:
        """Write the shards of every rank; then one of them writes the index, and the name that
        makes it all visible.
        """
        part, rank = atomic_write.part_folder(target), self._place.rank
        try:
            written = write_shards(part, rank, copies)
        except (OSError, SafetensorError) as error:
            written = Written(error=f"rank {rank} of the role: {error}")
        blobs = self._place.all_gather_bytes(msgspec.msgpack.encode(written), self._group)
        everyone = [msgspec.msgpack.decode(blob, type=Written) for blob in blobs]
        if errors := [one.error for one in everyone if one.error]:
            raise SpmdError(errors[0])
        if rank == 0:
            index = merged(progress, self._backend.contract(), self._layouts, everyone)
            (part / INDEX_FILE).write_bytes(msgspec.json.encode(index) + b"\n")
            atomic_write.finish_folder(target)


def load(folder: str, backend: Backend, context: RoleContext) -> tuple[TrainerState, list[str]]:
    """Fill the backend from a checkpoint, whatever number of ranks wrote it.

    The second result says why training does not go on from it bit for bit; mostly it is empty.
    Ranks: all of the role. Raises: ConfigError if there is no whole checkpoint at `folder`, or one
    of another model or an older version; SpmdError if a file of it has changed.
    """
    path = Path(folder)
    index = read_index(path)
    check(path, index.files, context.rank, context.size)
    context.barrier()  # nobody goes on with weights in which another has found a damaged file
    state = backend.state()
    weights_alone = set(index.tensors) == {WEIGHTS}
    if not weights_alone and set(index.tensors) != set(state):
        raise ConfigError(
            f"{folder} is of another trainer: it holds {_listed(index.tensors)}, not {_listed(state)}"
        )
    _check_names(path, index, state)
    with ShardReader(path, index) as reader:
        for kind, pieces in state.items():
            for name, one in pieces:
                if kind in index.tensors:
                    reader.fill(kind, name, one)
                else:
                    one.local.detach().zero_()
    backend.loaded(0 if weights_alone else index.progress.optimizer_steps)
    other = disagreement({"the trainer": backend.contract(), "the checkpoint": index.contract})
    return index.progress, [
        clause for clause in (other, NO_OPTIMIZER if weights_alone else "") if clause
    ]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _check_names(folder: Path, index: Index, state: State) -> None:
    """Raises: ConfigError naming a tensor that the checkpoint holds and the backend does not."""
    ours = {kind: {name for name, _ in pieces} for kind, pieces in state.items()}
    for kind, tensors in index.tensors.items():
        if unknown := sorted(tensors.keys() - ours[kind]):
            raise ConfigError(
                f"{folder} is of another model: it has {kind} of '{unknown[0]}', which the model lacks"
            )


def _listed(kinds: Mapping[str, object]) -> str:
    return ", ".join(sorted(kinds))


def _space(target: Path) -> str:
    """How much room there is, which is why most writes fail."""
    return f"{shutil.disk_usage(target.parent).free / 2**20:,.0f} MiB are free there"
