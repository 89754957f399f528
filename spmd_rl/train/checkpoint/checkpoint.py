"""Checkpoints of a trainer: writing one beside the training, and loading one.

A folder appears under its name only when it is whole. It holds safetensors files, and an index in
JSON with a closed schema (checkpoint_index.py): nothing in it is code.
"""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.controller.contracts import Contract, disagreement
from spmd_rl.controller.run.checksums import check
from spmd_rl.errors import ConfigError, DiskError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.observe import atomic_write
from spmd_rl.train.backend import ModelBackend, State, pieces_of_ranks
from spmd_rl.train.checkpoint.checkpoint_index import (
    INDEX_FILE,
    WEIGHTS,
    Index,
    WrittenByRank,
    merged,
    read_index,
    share,
)
from spmd_rl.train.checkpoint.shards import ShardReader, write_shards
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import PiecesByKind

GRADIENTS, FSDP2 = "gradients", "fsdp2"  # a fact of a checkpoint: who computes them
NO_OPTIMIZER = "the checkpoint holds no optimizer state, and the optimizer begins anew"
SAME_SETTINGS = "set trainer.optimizer.kind and trainer.freeze as in the run that wrote it"


class CheckpointWriter:
    """Writes checkpoints beside the training: a step waits for a copy in memory, not for the disk.

    Without `optimizer` they hold the weights alone. All ranks of the role call each method. One
    checkpoint is written at a time, by a thread on each rank. The threads have a process group of
    their own.

    Tensors of the backend's `host_kinds` are not copied but read where they lie, because the host
    may have no room for a copy. Whoever changes them calls `wait_until_read` before.
    """

    def __init__(self, backend: ModelBackend, context: RoleContext, optimizer: bool = True) -> None:
        self._backend = backend
        self._context = context
        self._optimizer = optimizer
        self._group: ProcessGroup | None = None
        self._layouts: list[PiecesByKind] = []  # of every rank; they never change
        self._thread: threading.Thread | None = None
        self._error: DiskError | None = None
        self._reads_in_place = False

    def start(self, folder: str, trainer_state: TrainerState) -> None:
        """Copy the state of backend and trainer, and begin to write it to `folder`.

        Blocks: until the previous checkpoint is written, and this one is copied.
        """
        self.wait()
        # absolute, because the working directory may change before the thread has written it
        target = Path(folder).absolute()
        if self._context.rank == 0:
            atomic_write.begin_folder(target)
        self._group = self._group or self._context.side_group()
        self._context.barrier()  # until the folder is there
        state = self._state()
        self._layouts = self._layouts or pieces_of_ranks(state, self._context, self._group)
        own = self._own_share(state)
        copies = {
            kind: tensors if kind in self._backend.host_kinds else _copied(tensors)
            for kind, tensors in own.items()
        }
        self._reads_in_place = any(own[kind] for kind in self._backend.host_kinds & own.keys())
        arguments = (target, copies, copy.copy(trainer_state))
        self._thread = threading.Thread(
            target=self._run, args=arguments, name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises: DiskError when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def wait_until_read(self) -> None:
        """Wait until tensors that were not copied may change. Raises: as `wait`."""
        if self._reads_in_place:
            self.wait()
        self._reads_in_place = False

    def check(self) -> None:
        """Raise a DiskError if writing the last checkpoint has failed so far."""
        if self._error is not None:
            raise self._error

    def _state(self) -> State:
        state = self._backend.state()
        return state if self._optimizer else {WEIGHTS: state[WEIGHTS]}

    def _own_share(self, state: State) -> State:
        """Return the part of its state that this rank writes."""
        indices = share(self._layouts, self._context.rank)
        return {kind: [state[kind][i] for i in indices[kind]] for kind in indices}

    def _run(self, target: Path, copies: State, trainer_state: TrainerState) -> None:
        try:
            self._write(target, copies, trainer_state)
        except Exception as error:  # noqa: BLE001  the main thread raises it, whatever it is
            self._error = DiskError(f"cannot save {target}: {error}; {_space(target)}")
            if self._context.rank == 0:
                atomic_write.remove_folder(atomic_write.part_folder(target))

    def _write(self, target: Path, copies: State, trainer_state: TrainerState) -> None:
        """Write this rank's shards. Rank 0 then writes the index, and renames the folder."""
        part = atomic_write.part_folder(target)
        by_rank = self._gather(_write_shards_of(self._context.rank, part, copies))
        if self._context.rank == 0:
            index = merged(trainer_state, _facts(self._backend), self._layouts, by_rank)
            (part / INDEX_FILE).write_bytes(msgspec.json.encode(index) + b"\n")
            atomic_write.finish_folder(target)

    def _gather(self, own: WrittenByRank) -> list[WrittenByRank]:
        """Return what each rank wrote. Raises: SpmdError when one of them could not write."""
        blobs = self._context.all_gather_bytes(msgspec.msgpack.encode(own), self._group)
        by_rank = [msgspec.msgpack.decode(blob, type=WrittenByRank) for blob in blobs]
        if errors := [written.error for written in by_rank if written.error]:
            raise SpmdError(errors[0])
        return by_rank


def load(
    folder: str, backend: ModelBackend, context: RoleContext
) -> tuple[TrainerState, list[str]]:
    """Fill the backend from a checkpoint, whatever number of ranks wrote it.

    The second result lists reasons why training does not go on from it bit for bit.
    Ranks: all of the role. Raises: ConfigError unless `folder` holds a whole checkpoint of this
    model and format; SpmdError if a file of it has changed.
    """
    path = Path(folder)
    index = read_index(path)
    check(path, index.files, context.rank, context.size)
    context.barrier()  # until every rank has found its files undamaged
    state = backend.state()
    names = _names_by_kind(state, context)
    _check_adapted(path, index.contract, backend.contract())
    _check_weights(path, index, names[WEIGHTS])
    if not index.weights_alone:
        _check_optimizer(path, index, names)
    _fill(state, path, index)
    backend.on_loaded(0 if index.weights_alone else index.progress.optimizer_steps)
    lacks_moments = index.weights_alone and set(state) != {WEIGHTS}
    return index.progress, _caveats(_facts(backend), index, lacks_moments)


def _write_shards_of(rank: int, folder: Path, copies: State) -> WrittenByRank:
    """Write the shards of one rank, and return what it wrote, or the error for all ranks to see."""
    try:
        return write_shards(folder, rank, copies)
    except (OSError, SafetensorError) as error:
        return WrittenByRank(error=f"rank {rank} of the role: {error}")


def _copied(tensors: Sequence[tuple[str, LocalTensor]]) -> list[tuple[str, LocalTensor]]:
    """Return the tensors copied to the CPU."""
    return [(name, replace(tensor, local=_on_cpu(tensor.local))) for name, tensor in tensors]


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _check_optimizer(folder: Path, index: Index, names: Mapping[str, set[str]]) -> None:
    """Raise a ConfigError unless the checkpoint is of the same optimizer of the same parameters."""
    if set(index.tensors) != set(names):
        raise ConfigError(
            f"{folder} is of another optimizer: it holds {_listed(index.tensors)}, "
            f"not {_listed(names)}; {SAME_SETTINGS}"
        )
    for kind in sorted(names.keys() - {WEIGHTS}):
        own = names[kind]
        if different := sorted(own.symmetric_difference(index.tensors[kind])):
            owner, other = ("the trainer", "it") if different[0] in own else ("it", "the trainer")
            raise ConfigError(
                f"{folder} is of another optimizer: {owner} has {kind} of '{different[0]}', and "
                f"{other} has not; {SAME_SETTINGS}"
            )


def _check_weights(folder: Path, index: Index, own: set[str]) -> None:
    """Raise a ConfigError that names a weight which only the checkpoint has, or only the model."""
    saved = index.tensors[WEIGHTS].keys()
    if unknown := sorted(saved - own):
        raise ConfigError(
            f"{folder} is of another model: it has {WEIGHTS} of '{unknown[0]}', "
            "which the model lacks"
        )
    if missing := sorted(own - saved):
        raise ConfigError(
            f"{folder} is of another model: it has no {WEIGHTS} of '{missing[0]}', "
            "which the model has"
        )


def _check_adapted(folder: Path, saved: Contract, own: Contract) -> None:
    """Raise a ConfigError for adapters that are computed otherwise, or are of another base.

    In another dtype, a base has other bits, so there nothing is compared.
    """
    remedies = {"lora": "trainer.lora"}
    if saved.get("dtype") == own.get("dtype"):
        remedies["base_weights"] = "model and trainer.init, and with random weights trainer.seed,"
    for key, remedy in remedies.items():
        if saved.get(key) != own.get(key):
            raise ConfigError(
                f"{folder} holds adapters of another kind or base: its {key} is "
                f"{saved.get(key, 'none')!r}, not {own.get(key, 'none')!r}; set {remedy} as in the "
                "run that wrote it"
            )


def _names_by_kind(state: State, context: RoleContext) -> dict[str, set[str]]:
    """Return the names that all ranks have together.

    A stage of a pipeline has but some of them, and so has a shard of Megatron-core's optimizer.
    """
    held = pieces_of_ranks(state, context)
    return {kind: {piece.name for one in held for piece in one[kind]} for kind in state}


def _fill(state: State, folder: Path, index: Index) -> None:
    """Read the state from the checkpoint. Kinds of tensors that it does not hold become zero."""
    with ShardReader(folder, index) as reader:
        for kind, tensors in state.items():
            for name, tensor in tensors:
                if kind in index.tensors:
                    reader.fill(kind, name, tensor)
                else:
                    tensor.local.detach().zero_()


def _facts(backend: ModelBackend) -> Contract:
    """Return what the bits of a train step depend on: the numeric contract, and the gradients."""
    return backend.contract() | {GRADIENTS: backend.gradients}


def _caveats(facts: Contract, index: Index, lacks_moments: bool) -> list[str]:
    """Return why a trainer of these facts does not go on from the checkpoint bit for bit."""
    saved = {GRADIENTS: FSDP2} | index.contract  # earlier checkpoints do not say it
    contracts = {"the trainer": facts, "the checkpoint": saved}
    caveats = [disagreement(contracts), NO_OPTIMIZER if lacks_moments else ""]
    return [caveat for caveat in caveats if caveat]


def _listed(kinds: Mapping[str, object]) -> str:
    return ", ".join(sorted(kinds))


def _space(target: Path) -> str:
    """Return how much room the disk has, because most writes fail for want of it.

    A run that is ended may have removed the folder meanwhile, and those above it.
    """
    try:
        return f"{shutil.disk_usage(target.parent).free / 2**20:,.0f} MiB are free there"
    except FileNotFoundError:
        return _space(target.parent)
