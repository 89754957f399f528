"""The FrozenModel role: a reference, a teacher or a reward model, which computes but never learns.

It holds the weights alone, in the dtype that it computes in, sharded as a trainer's are. The
controller imports this module too: torch comes in with the instance, on workers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from spmd_rl.controller.capabilities import (
    Contracted,
    MemoryPlanner,
    Saver,
    Sleeper,
    WeightReceiver,
)
from spmd_rl.controller.endpoint import Role, Sharded, collective, local
from spmd_rl.controller.shard_receipts import of_shard
from spmd_rl.errors import ContractError
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import Placement
from spmd_rl.model.read import head_of, read_spec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.phases import RoleSleep
from spmd_rl.offload.residency import Receipt
from spmd_rl.train.checkpoint.trainer_state import TrainerState
from spmd_rl.train.config import FrozenConfig
from spmd_rl.train.cost.memory import frozen_memory
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import SequenceValues, TokenValues, TopLogprobs

WEIGHTS = "weights"  # tag of a frozen model's memory

if TYPE_CHECKING:
    from spmd_rl.weights.ends import WeightSink

UNCHANGED_FILE = "unchanged"  # in a checkpoint whose weights are those of the model folder
FIRST_VERSION = -1  # of weights that no push has replaced


class FrozenModel(Role, WeightReceiver, Saver, Sleeper, Contracted, MemoryPlanner):
    """Scores batches with the weights in `model`, a Hugging Face folder, or with pushed ones.

    It has a value head if the folder's config.json names an architecture for sequence
    classification. A checkpoint holds its weights only after a push has replaced them. `sleep` says
    in which phases the weights are awake; the controller passes it. A method that needs them while
    they sleep raises a ResidencyError.
    """

    MEMORY_TAGS: ClassVar[tuple[str, ...]] = (WEIGHTS,)

    def __init__(
        self, cfg: FrozenConfig, context: RoleContext, model: str, sleep: RoleSleep | None = None
    ) -> None:
        super().__init__(cfg, context)
        self.cfg: FrozenConfig = cfg
        self.model = model
        from spmd_rl.offload.role_memory import RoleMemory
        from spmd_rl.train.batch_runner import BatchRunner
        from spmd_rl.train.build import build_frozen
        from spmd_rl.train.checkpoint.checkpoint import CheckpointWriter

        self.memory = RoleMemory(sleep, context.device)
        self.backend = build_frozen(cfg, model, context, self.memory)
        self.memory.reserve_saves()  # so that a host with too little is refused here
        cp = size_of(context.placement.axes, "cp")
        self.runner = BatchRunner(self.backend, context, cp * cfg.max_tokens)
        self.checkpoints = CheckpointWriter(self.backend, context)
        self._state = TrainerState(FIRST_VERSION)
        self._is_partly_pushed = False
        self._resume_differences: list[str] = []

    @classmethod
    def planned_memory(
        cls, cfg: FrozenConfig, placement: Placement, model: str, on_gpu: bool, row_shards: int = 1
    ) -> Sequence[TagBytes]:
        """Return what the role takes of one of its ranks, by tag; `row_shards` says how it sums."""
        spec = replace(read_spec(model), row_shards=row_shards)
        return frozen_memory(spec, cfg, placement, head_of(model))

    @collective
    def score(self, batch: Sharded[Batch]) -> Sharded[TokenValues]:
        """Return the log-probabilities of the batch's tokens."""
        self._require_whole()
        return self.runner.score(batch)

    @collective
    def top_logprobs(self, batch: Sharded[Batch], k: int) -> Sharded[TopLogprobs]:
        """Return the `k` likeliest tokens before each token of the mask, and their log-probs."""
        self._require_whole()
        return self.runner.top_logprobs(batch, k)

    @collective
    def values(self, batch: Sharded[Batch]) -> Sharded[TokenValues]:
        """Return the value of the state before each token of the mask; it needs a value head."""
        self._require_whole()
        return self.runner.values(batch)

    @collective
    def rewards(self, batch: Sharded[Batch]) -> Sharded[SequenceValues]:
        """Return the value of the state after each sequence; it needs a value head."""
        self._require_whole()
        return self.runner.rewards(batch)

    @collective
    def version(self) -> int:
        """Return the version of the weights that were pushed last, -1 before any."""
        return self._state.version

    @collective
    def save(self, folder: str) -> None:
        """Begin to write the weights if a push has replaced them; else note that none has."""
        if self._state.version != FIRST_VERSION:
            self.memory.require("save", WEIGHTS)
            self.checkpoints.start(folder, self._state)
        elif self.context.rank == 0:
            Path(folder).mkdir(parents=True)
            (Path(folder) / UNCHANGED_FILE).touch()

    @collective
    def wait_until_saved(self) -> None:
        """Wait until the last checkpoint is written. Raises: SpmdError when it could not be."""
        self.checkpoints.wait()

    @collective
    def load(self, folder: str) -> int:
        """Continue with the weights of a checkpoint, and return their version."""
        from spmd_rl.train.build import first_weights
        from spmd_rl.train.checkpoint import checkpoint

        self.memory.require("load", WEIGHTS)
        if (Path(folder) / UNCHANGED_FILE).exists():
            if self._state.version != FIRST_VERSION:
                first = first_weights(self.cfg, self.model, head_of(self.model), self.backend.local)
                self.backend.fill(first)
            self._state, self._resume_differences = TrainerState(FIRST_VERSION), []
        else:
            self._state, self._resume_differences = checkpoint.load(
                folder, self.backend, self.context
            )
        self._is_partly_pushed = False
        self.memory.note_change(WEIGHTS)
        return self._state.version

    @collective
    def sleep(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Give the memory of the weights back; their bytes wait on the host."""
        return of_shard(self.context, self.memory.sleep(tags))

    @collective
    def wake(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Take the memory of the weights again, with their bytes."""
        return of_shard(self.context, self.memory.wake(tags))

    @local
    def resume_differences(self) -> list[str]:
        """Return the reasons why log-probs do not have the bits that they had before."""
        return list(self._resume_differences)

    def weight_sink(self) -> WeightSink:
        """Return this rank's share of the weights. It never becomes the memory of a trainer."""
        from spmd_rl.weights.tensor_ends import CopyingSink

        return CopyingSink(self.backend.local_weights().items(), self._on_open, self._on_commit)

    def numeric_contract(self) -> dict[str, str | int]:
        """Return what the forward pass's bits depend on besides the weights."""
        return self.backend.contract()

    def _on_open(self) -> None:
        self.memory.require("a push", WEIGHTS)
        self.memory.note_change(WEIGHTS)
        self._is_partly_pushed = True

    def _on_commit(self, version: int) -> None:
        self._is_partly_pushed = False
        self._state.version = version

    def _require_whole(self) -> None:
        """Raise a ResidencyError if the weights sleep, and a ContractError if a push has begun and
        was not committed.
        """
        self.memory.require("a forward pass", WEIGHTS)
        if self._is_partly_pushed:
            raise ContractError(
                "the weights of this frozen model are partly those of a push that failed: "
                "push again before it scores"
            )
