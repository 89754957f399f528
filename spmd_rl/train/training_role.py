"""TrainingRole: what every role that learns from batches has, whatever head its model has.

The controller imports this module too, for the endpoints: torch comes in with the instance, on
workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from spmd_rl.algo.losses import Loss, Needs
from spmd_rl.controller.capabilities import (
    Contracted,
    MemoryPlanner,
    Saver,
    Sleeper,
    WeightProvider,
)
from spmd_rl.controller.endpoint import Role, Sharded, collective, local
from spmd_rl.controller.shard_receipts import of_shard
from spmd_rl.errors import ContractError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import Placement
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import Head
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.offload.phases import RoleSleep
from spmd_rl.offload.residency import Receipt
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.kinds import kind_of
from spmd_rl.types.batch import Batch
from spmd_rl.types.routes import EXPERT_IDS

# tags of a trainer's memory; only a trainer of adapters has a base, and a merged push reads it
MASTER, MOMENTS, BASE, PUSHED_BASE = "master", "moments", "base", "pushed_base"
ALL_WEIGHTS = (MASTER, BASE, PUSHED_BASE)  # what a forward pass reads
MERGED_FACT: dict[str, str | int] = {"push": "adapters merged into rounded weights, no promise"}

if TYPE_CHECKING:
    from spmd_rl.weights.ends import WeightSource


class TrainingRole(Role, WeightProvider, Saver, Sleeper, Contracted, MemoryPlanner):
    """Learns from batches. `model` is a Hugging Face folder: config, tokenizer and first weights.

    Its version names the current weights. A push sets it, and each train step raises it by one.
    `sleep` says in which phases its memory is awake; the controller passes it. A method that needs
    memory which sleeps raises a ResidencyError.
    """

    HEAD: ClassVar[Head]
    MEMORY_TAGS: ClassVar[tuple[str, ...]] = (MASTER, MOMENTS, BASE, PUSHED_BASE)

    def __init__(
        self, cfg: TrainerConfig, context: RoleContext, model: str, sleep: RoleSleep | None = None
    ) -> None:
        super().__init__(cfg, context)
        self.cfg: TrainerConfig = cfg
        self.model = model
        from spmd_rl.offload.role_memory import RoleMemory
        from spmd_rl.train.checkpoint.checkpoint import CheckpointWriter

        self.memory = RoleMemory(sleep, context.device)
        self.learner = kind_of(cfg, self.HEAD).build(cfg, model, context, self.HEAD, self.memory)
        self.memory.reserve_saves()  # so that a host with too little is refused here
        self.backend = self.learner.backend
        self.checkpoints = CheckpointWriter(self.backend, context, cfg.save_optimizer)
        self._resume_differences: list[str] = []
        self._before_change: list[Callable[[], None]] = []
        self._steps_awake = 0  # train steps since the last sleep
        self._steps_before_sleep = 0  # train steps that the last sleep followed

    @classmethod
    def planned_memory(
        cls, cfg: TrainerConfig, placement: Placement, model: str, on_gpu: bool, row_shards: int = 1
    ) -> Sequence[TagBytes]:
        """Return what the role takes of one of its ranks, by tag; `row_shards` says how it sums."""
        spec = replace(read_spec(model), row_shards=row_shards)
        return kind_of(cfg, cls.HEAD).memory(spec, cfg, placement, cls.HEAD)

    @classmethod
    def num_data_parts(cls, cfg: TrainerConfig) -> int:
        return cfg.data_parts

    @collective
    def train_step(
        self,
        batch: Sharded[Batch],
        loss: Loss,
        lr: float | None = None,
        needs: Needs = Needs(),  # noqa: B008 - it is frozen
    ) -> dict[str, float]:
        """Learn from one batch, and return the metrics. `lr` overrides the schedule's rate."""
        self.checkpoints.check()
        self.memory.require("train_step", *ALL_WEIGHTS)
        self.memory.require_soon("train_step", MOMENTS)
        self.learner.runner.check_fits(batch)
        self._check_replay(batch)
        self.checkpoints.wait_until_read()
        self._announce_change()
        try:
            metrics = self.learner.train_step(batch, loss, lr, needs)
        finally:
            self.memory.note_change(MASTER, MOMENTS)
        self._steps_awake += 1
        if self._steps_awake == self._steps_before_sleep:
            self.memory.begin_save(MOMENTS, MASTER)
        return metrics | self._restore_metrics()

    def _check_replay(self, batch: Batch) -> None:
        """Raise a ContractError for recorded routes that a policy's backend cannot replay."""
        if self.HEAD == "lm" and EXPERT_IDS in batch.columns and self.backend.replays is None:
            raise ContractError(
                "the batch has recorded routes, and FSDP2 alone replays them, into mixtures as "
                "sampling.replay_routes needs: train with it, or set that to false where tokens "
                "are drawn"
            )

    @collective
    def begin_after(self, num_steps: int) -> None:
        """Count `num_steps` train steps as done, in the version and in the schedule of the rate.

        The optimizer's moments stay as they are.
        """
        self.learner.state.version = num_steps
        self.learner.state.steps_before = num_steps * self.cfg.minibatches

    @collective
    def version(self) -> int:
        """Return the version of the current weights."""
        return self.learner.state.version

    @collective
    def save(self, folder: str) -> None:
        """Begin to write a checkpoint of the present state; `wait_until_saved` waits for it."""
        self.memory.require("save", MASTER, MOMENTS)
        self.checkpoints.start(folder, self.learner.state)

    @collective
    def wait_until_saved(self) -> None:
        """Wait until the last checkpoint is written. Raises: SpmdError when it could not be."""
        self.checkpoints.wait()

    @collective
    def load(self, folder: str) -> int:
        """Resume from a checkpoint, written by any number of ranks, and return its version."""
        from spmd_rl.train.checkpoint import checkpoint

        self.memory.require("load", MASTER, MOMENTS)
        self.checkpoints.wait_until_read()
        self._announce_change()
        self.learner.state, self._resume_differences = checkpoint.load(
            folder, self.backend, self.context
        )
        self.memory.note_change(MASTER, MOMENTS)
        return self.learner.state.version

    @local
    def resume_differences(self) -> list[str]:
        """Return the reasons why training does not go on bit for bit from what was loaded."""
        if self.context.world.device == "cuda" and not self.cfg.deterministic:
            order = "gradients are summed in any order without trainer.deterministic = true"
            return [*self._resume_differences, order]
        return list(self._resume_differences)

    @collective
    def export_hf(self, folder: str, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        """Write a folder that `transformers` loads, with the first model's config and tokenizer.

        Adapters make a folder that `peft` loads, with the tokenizer. Those of a model of which
        `peft` would drop some are merged into whole weights.
        """
        from spmd_rl.train.checkpoint.export import export_hf

        self.memory.require("export_hf", MASTER)
        export_hf(folder, self.model, self.backend, self.context, dtype, self.cfg)

    @collective
    def sleep(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Give the memory of master weights and moments back; their bytes wait on the host.

        They begin to go there after a train step, if the last sleep followed as many of them.
        """
        if self._steps_awake:
            self._steps_before_sleep, self._steps_awake = self._steps_awake, 0
        return of_shard(self.context, self.memory.sleep(tags))

    @collective
    def wake(self, tags: tuple[str, ...] = ()) -> Sharded[list[Receipt]]:
        """Take the memory again, with its bytes. Those of the moments may come in the background
        of the next forward pass.
        """
        return of_shard(self.context, self.memory.wake(tags, in_background=(MOMENTS,)))

    def on_weights_pushed(self, version: int) -> None:
        """Note that the weights just pushed are `version`, here as at the engine."""
        self.learner.state.version = version

    def weight_source(self) -> WeightSource:
        """Return this rank's share of the master weights, which train steps update in place.

        A merged push makes its weights of them and of the base.
        """
        return self.backend.source(partial(self.memory.require, "a push", MASTER, PUSHED_BASE))

    def call_before_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` before each change of the weights, for a role that shares them."""
        self._before_change.append(callback)

    def numeric_contract(self) -> dict[str, str | int]:
        """Return what the forward pass's bits depend on besides the weights.

        Of a merged push it says that an engine's log-probs differ.
        """
        return self.backend.contract() | (MERGED_FACT if self.cfg.lora.merged_push else {})

    def _restore_metrics(self) -> dict[str, float]:
        """Return how long the slowest rank waited for bytes from the host; nothing without sleep.

        Ranks: all of the role.
        """
        if not self.memory.sleeps:
            return {}
        microseconds = self.context.all_reduce_max(int(1e6 * self.memory.take_waited_s()))
        return {"memory/restore_s": microseconds / 1e6}

    def _announce_change(self) -> None:
        for callback in self._before_change:
            callback()
