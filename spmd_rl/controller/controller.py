"""Controller: what a recipe uses to split the world, spawn roles, link their weights, and count
steps and phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import Codec, Packed, pack
from spmd_rl.controller.channel.import_names import name_of
from spmd_rl.controller.channel.messages import BuildMeshes, Spawn
from spmd_rl.controller.constructor import Constructor
from spmd_rl.controller.contracts import Contract, record_contracts
from spmd_rl.controller.endpoint import Role
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.link import Link, connect, link_placement
from spmd_rl.controller.run.checkpoints import CheckpointPart
from spmd_rl.controller.run.evaluations import Schedule
from spmd_rl.controller.run.step_loop import StepLoop
from spmd_rl.controller.run.steps import LoopStep, RunObserver
from spmd_rl.controller.sleepers import Sleepers, SleepPolicy
from spmd_rl.controller.weight_sync import WeightSync, WeightSyncConfig
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements, plan_split
from spmd_rl.observe.start_phase import start_phase
from spmd_rl.types.groups import Group

R = TypeVar("R", bound=Role)

_CONTRACT, _SEES = Codec(Contract | None), Codec(bool)


class ControllerWorld:
    """The ranks of the run. A recipe splits them among its roles."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.size = dispatcher.roster.world_size

    def split(self, split: Any) -> Placements:
        """Place the roles that `split` (a dataclass or mapping of RoleSplit) names, and build their
        meshes.

        Blocks: until every rank of the world has built them.
        Raises: PlanError when they do not fit.
        """
        placements = plan_split(split, self.size)
        self.build(list(placements.values()))
        return placements

    def nodes(self) -> dict[int, int]:
        """Return the number of each rank's host, by rank."""
        workers = self._dispatcher.roster.workers
        hosts = {rank: worker.hello.host for rank, worker in sorted(workers.items())}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.values()))}
        return {rank: numbers[host] for rank, host in hosts.items()}

    def build(self, placements: list[Placement]) -> None:
        """Build the meshes of `placements` on every rank of the world.

        Blocks: until every rank of the world has built them.
        """
        dispatcher, shared = self._dispatcher, self._dispatcher.shared
        folder = str(shared.folder) if shared is not None else ""
        command = BuildMeshes(placements, dispatcher.traces, folder)
        answers = dispatcher.run("world.split", tuple(range(self.size)), command).values()
        sees = map(_SEES.unpack, answers)
        if shared is not None and not all(sees):  # a worker may be in a container of its own
            shared.close()
            dispatcher.shared = None


class Controller:
    """The recipe's access to its run, with the run's `run_folder` and `seed`.

    `observer` records every phase and step. `planned` holds settings for `spawn`, by the name of a
    placement; `row_shards` among them is that of the role's models. `sleep` says whether roles give
    memory back in turn, and in which phases.
    """

    def __init__(
        self,
        run: RunConfig,
        dispatcher: Dispatcher,
        observer: RunObserver | None = None,
        planned: Mapping[str, Mapping[str, Any]] | None = None,
        sleep: SleepPolicy = SleepPolicy(),  # noqa: B008 - it is frozen
    ) -> None:
        self.world = ControllerWorld(dispatcher)
        self.run_folder: Path = run.path
        self.seed = run.seed
        self._run = run
        self._dispatcher = dispatcher
        self._planned = planned or {}
        self._loop = StepLoop(
            run, dispatcher, observer, lambda roles: self._sleepers.wake_for_checkpoint(roles)
        )
        self._sleepers = Sleepers(sleep, self._loop.timed, self._loop.on_receipts)
        self._handles: dict[str, Handle] = {}

    def spawn(
        self, role: type[R], cfg: Any, *, on: Placement, name: str | None = None, **settings: Any
    ) -> R:
        """Build a role on every rank of a placement; the result has the role's endpoints.

        `settings` are keyword arguments of the role's `__init__`, such as `model`. Roles of these
        ranks that sleep in some phase are put to sleep first, so that there is room.

        Blocks: until all are built.
        Raises: PlanError when the name is taken; ConfigError when the role has only part of a
        capability, or for a setting that the role does not take, before anything is sent;
        ContractError when its ranks could not have the same bits and `run.exact` asks for them;
        and what a constructor raised.
        """
        name = name or on.name
        if name in self._handles:
            raise PlanError(f"two roles cannot both be called '{name}': give spawn a name")
        planned = {**self._planned.get(on.name, {}), "sleep": self._sleepers.role_sleep(name)}
        row_shards = planned.get("row_shards", 1)
        value = pack((cfg, *Constructor(role).arguments(settings, planned)))
        handle = Handle(name, role, on, self._dispatcher, role.num_data_parts(cfg))
        self._sleepers.make_room(on)
        spawn = Spawn(name, name_of(role), on, name_of(type(cfg)), row_shards)
        with start_phase(f"building {name}"):
            answers = self._dispatcher.run(f"{name}.__init__", on.ranks, spawn, value)
        self._handles[name] = handle
        self._sleepers.add(handle)
        self._record_contracts(name, answers)
        return cast(R, handle)

    def link(self, source: Role, destination: Role, *, alias: bool = True) -> Link:
        """Connect two roles, so that `push` gives the destination the weights of the source.

        With `alias` the two share memory where both hold the same box in the same dtype in one
        process, unless they sleep in turn. The destination then cannot generate once the source has
        changed, until the next push. Without it, the destination continues with the weights that
        it has.

        Blocks: until both ends have agreed on the plan.
        Raises: ConfigError when a role has no weights to push or to receive; PlanError when the
        weights do not fit; ContractError when the two could not have the same bits and `run.exact`
        asks for them.
        """
        ends = cast(Handle, source), cast(Handle, destination)
        placement = link_placement(*ends)
        self.world.build([placement])
        sleeps = any(self._sleepers.role_sleep(end.name) is not None for end in ends)
        cfg = WeightSyncConfig(ends[0].name, ends[1].name, alias and not sleeps)
        weight_sync = self.spawn(WeightSync, cfg, on=placement)
        layouts = connect(weight_sync, placement, self.run_folder, self._run.exact)
        plan = weight_sync.prepare.call(layouts, self.world.nodes())
        names = cfg.source, cfg.destination
        return Link(weight_sync, plan, names, self._run, self._loop.record)

    @contextmanager
    def phase(self, name: str, awake: Sequence[Role] | None = None) -> Iterator[None]:
        """Time what runs inside as phase `name`, with what it needs awake.

        The `phases` of the recipe's config say what that is. With `awake`, all memory of these
        roles is, and Sleepers that share processes with them sleep. Roles go to sleep before others
        wake; they stay as they are after the phase, until another needs them otherwise.
        Raises: ResidencyError when a role has too little memory to wake.
        """
        if awake is None:
            self._sleepers.enter(name)
        else:
            self._sleepers.wake_only([cast(Handle, role) for role in awake])
        calls = self._dispatcher.calls
        outer, calls.phase = calls.phase, name
        try:
            with self._loop.timed(name):
                yield
        finally:
            calls.phase = outer

    def resume(self, **parts: CheckpointPart) -> int:
        """Name what checkpoints hold, and load the newest into it; return the step to continue
        with, which is 0 in a fresh run.

        A part is a role that is a Saver, an object with methods `save(folder)` and `load(folder)`,
        or one with `state()` and `restore(state)`. An object with a method `close` is closed once
        the recipe has returned.
        Blocks: until every role has loaded.
        Raises: ConfigError when a role is no Saver, or the checkpoint is of another recipe.
        """
        return self._loop.resume(parts)

    def warmup(self, num_steps: int, start: int) -> Iterator[LoopStep]:
        """Yield steps before step 1, such as supervised ones; none in a run that continues at step
        `start`.

        Each step is timed, and what it logs is kept. Nothing is saved: a run that ends during its
        warm-up starts again from the beginning.
        """
        return self._loop.warmup(num_steps, start)

    def steps(self, num_steps: int, start: int = 0) -> Iterator[LoopStep]:
        """Yield steps `start` to `num_steps - 1`, time each, and save checkpoints between them.

        Blocks: after the last step, until its checkpoint is complete.
        Raises: the error that ends the run, once a checkpoint is saved, if a signal asked for it.
        """
        return self._loop.steps(num_steps, start)

    def record_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, list[Group]]
    ) -> None:
        """Record an evaluation of the weights after `num_steps` steps: its metrics in the line of
        that step (0: before the first), and its samples by the names of the sets.
        """
        self._loop.record_evaluation(num_steps, metrics, groups)

    def plan_evaluations(self, schedule: Schedule, sets: Sequence[str]) -> None:
        """Say when the run evaluates, and which sets. With `run.best`, each evaluation has a
        checkpoint.

        Raises: ConfigError where `run.best` names another set.
        """
        self._loop.evaluations.plan(schedule, sets)

    @property
    def num_done(self) -> int:
        """How many steps of the loop are done, those of earlier starts included."""
        return self._loop.num_done

    def close(self) -> None:
        """Finish the run after the recipe has returned, perhaps from within its loop: the step that
        it left is written and saved as the last one.

        Blocks: until the last checkpoint is complete.
        """
        self._loop.close()

    def _record_contracts(self, name: str, answers: dict[int, Packed]) -> None:
        """Record the numeric contracts that the ranks of a role answered with, if it has them."""
        by_rank = {rank: _CONTRACT.unpack(answer) for rank, answer in answers.items()}
        contracts = {
            f"{name} on rank {rank}": contract
            for rank, contract in by_rank.items()
            if contract is not None
        }
        if contracts:
            record_contracts(self.run_folder, name, contracts, self._run.exact)
