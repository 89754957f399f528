"""What a recipe is given: it splits the world, spawns roles, links their weights, and counts steps
and phases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.channel.codec import NOTHING, Codec, pack
from spmd_rl.controller.channel.import_names import name_of
from spmd_rl.controller.channel.wire import BuildMeshes, Spawn, encode
from spmd_rl.controller.contracts import Contract, agree
from spmd_rl.controller.endpoint import Role
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.lifecycle.deadlines import TerminationNotice
from spmd_rl.controller.lifecycle.dispatcher import Dispatcher
from spmd_rl.controller.link import Link, connect
from spmd_rl.controller.run.checkpoints import Checkpoints, Part, Record
from spmd_rl.controller.run.steps import Observer, Step
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements, plan_split
from spmd_rl.observe.trace import now_ns

R = TypeVar("R", bound=Role)

_CONTRACT = Codec(Contract | None)


class ControllerWorld:
    """The ranks of the run, seen from the controller."""

    def __init__(self, board: Dispatcher) -> None:
        self._board = board
        self.size = board.roster.world_size

    def split(self, split: Any) -> Placements:
        """Place the roles that `split` (a dataclass or mapping of RoleSplit) names, and build their
        meshes.

        Blocks: until every rank of the world has built them. Raises: PlanError when they do not
        fit.
        """
        placements = plan_split(split, self.size)
        self.build(list(placements.values()))
        return placements

    def nodes(self) -> dict[int, int]:
        """The number of each rank's host, by rank."""
        hosts = {
            rank: worker.hello.host for rank, worker in sorted(self._board.roster.workers.items())
        }
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts.values()))}
        return {rank: numbers[host] for rank, host in hosts.items()}

    def build(self, placements: list[Placement]) -> None:
        """Build the meshes of `placements` on every rank of the world."""
        record = self._board.calls.open("world.split", tuple(range(self.size)))
        self._board.issue(
            record, encode(BuildMeshes(placements, self._board.traces)), [(record.ranks, NOTHING)]
        )
        self._board.collect(record)


class Controller:
    """The recipe's hands. `run_folder` and `seed` are the run's; `observer` is told of every phase
    and step.
    """

    def __init__(self, run: RunConfig, board: Dispatcher, observer: Observer | None = None) -> None:
        self.world = ControllerWorld(board)
        self.run_folder: Path = run.path
        self.seed = run.seed
        self._save_every = run.save_every
        self._grace_s = run.grace_s
        self._exact = run.exact
        self._checkpoints = Checkpoints(
            run.path / "checkpoints", run.keep_checkpoints, run.keep_best
        )
        self._parts: dict[str, Part] = {}
        self.observer = observer
        self._board = board
        self._handles: dict[str, Handle] = {}
        self._asleep: set[str] = set()
        self._step: Step | None = None

    def spawn(self, role: type[R], cfg: Any, *, on: Placement, name: str | None = None) -> R:
        """Build a role on every rank of a placement; what comes back has its endpoints.

        Blocks: until all are built. Raises: PlanError when the name is taken, or what a constructor
        raised; ContractError when its ranks could not have the same bits and `run.exact` asks for
        them.
        """
        name = name or on.name
        if name in self._handles:
            raise PlanError(f"two roles cannot both be called '{name}': give spawn a name")
        handle = Handle(name, role, on, self._board)
        value = pack(cfg)
        record = self._board.calls.open(f"{name}.__init__", on.ranks)
        self._board.issue(
            record, encode(Spawn(name, name_of(role), on, name_of(type(cfg)))), [(on.ranks, value)]
        )
        answers = self._board.collect(record)
        self._handles[name] = handle
        said = {f"{name} on rank {rank}": _CONTRACT.unpack(answers[rank]) for rank in on.ranks}
        if contracts := {
            party: contract for party, contract in said.items() if contract is not None
        }:
            agree(self.run_folder, name, contracts, self._exact)
        return cast(R, handle)

    def link(self, source: Role, destination: Role, *, alias: bool = True) -> Link:
        """Connect two roles' weights, so that `push` brings the destination those of the source.

        With `alias` they are one memory where both hold the same box in the same type in one
        process. The destination then cannot generate once the source has changed, until the next
        push; without it, it goes on with what it has.

        Blocks: until both ends have agreed on the plan. Raises: PlanError when it cannot work;
        ContractError when the two could not have the same bits and `run.exact` asks for them.
        """
        return connect(self, cast(Handle, source), cast(Handle, destination), self._exact, alias)

    @contextmanager
    def phase(self, name: str, awake: Sequence[Role] = ()) -> Iterator[None]:
        """Time what runs inside as phase `name`, with the roles in `awake` awake.

        Roles that share processes with them and can `sleep` are put to sleep first.
        """
        self._rouse([cast(Handle, role) for role in awake])
        calls = self._board.calls
        outer, calls.phase = calls.phase, name
        try:
            with self._timed(name):
                yield
        finally:
            calls.phase = outer

    def resume(self, **parts: Part) -> int:
        """Name what checkpoints hold, and load the newest into it; returns the step to go on with,
        0 in a fresh run.

        A part is a role with endpoints `save(folder)` and `load(folder)`, an object with methods of
        these names, or one with `state()` and `restore(state)`. A role's endpoint `caveats()` says
        what keeps it from going on exactly.
        Blocks: until every role has loaded. Raises: ConfigError when the checkpoint is of another
        recipe.
        """
        self._parts = parts
        self._board.final_message.newest_step = self._checkpoints.newest
        found = self._checkpoints.restore(parts)
        if found is None:
            return 0
        path, record = found
        print(
            f"resuming at step {record.next_step + 1} from {path}{self._caveat(record)}", flush=True
        )
        return record.next_step

    def warmup(self, num_steps: int, start: int) -> Iterator[Step]:
        """Steps before step 1, such as supervised ones; none in a run that goes on from step
        `start`.

        Each is timed, and what it logs is kept. Nothing is saved: a run that ends here begins
        again.
        """
        if start:
            return
        if self.observer is not None:
            self.observer.on_warmup(num_steps)
            self._board.calls.on_long_wait = self.observer.catch_up
        for index in range(-num_steps, 0):
            step = Step(index, self.observer)
            yield step
            if self.observer is not None:
                self.observer.on_step(step)

    def steps(self, num_steps: int, start: int = 0) -> Iterator[Step]:
        """Steps `start` to `num_steps - 1`, each timed; checkpoints are begun between them.

        Blocks: after the last, until its checkpoint is whole. Raises: the run's end, saved, if a
        SIGTERM asked for it.
        """
        notice, calls = self._board.termination, self._board.calls
        if self.observer is not None:
            self.observer.on_steps(start, num_steps)
            calls.on_long_wait = self.observer.catch_up
        notice.grace_s = self._grace_s if self._parts else 0.0
        # a step begins where the one before it ended
        began, waited_s = time.monotonic(), calls.waited_s
        for index in range(start, num_steps):
            notice.lost_work = (
                f"; step {index + 1} did not end within {self._grace_s:g} s and is lost"
            )
            self._step = step = Step(index, self.observer, began)
            try:
                yield step
            finally:  # also where the recipe leaves its loop
                began = time.monotonic()
                step.elapsed_s = began - step.began
                step.waited_s, waited_s = calls.waited_s - waited_s, calls.waited_s
            self._end(step, last=index + 1 == num_steps)
        self._checkpoints.settle()
        notice.grace_s = 0.0  # what follows is done by the same command, should it be ended

    def close(self) -> None:
        """The recipe has returned, perhaps from within its loop: the step it left is written and
        saved as the last is.

        Blocks: until the last checkpoint is whole.
        """
        if self._step is not None:
            self._end(self._step, last=True)
        self._checkpoints.settle()

    def _end(self, step: Step, *, last: bool) -> None:
        """Write what is known of a step, and begin its checkpoint if one is due."""
        notice, ended = self._board.termination, step.began + step.elapsed_s
        self._board.trace.add(
            "step", round(step.began * 1e9), round(ended * 1e9), step=step.index + 1
        )
        if self.observer is not None:
            self.observer.on_step(step)
        self._board.trace.flush()
        self._step = None
        record = Record(step.index + 1, self.seed, step.reward)
        due = last or (self._save_every and record.next_step % self._save_every == 0)
        if self.observer is not None and (due or notice.error is not None):
            self.observer.catch_up()
        if notice.error is not None:
            self._save_and_end(record, notice)
        if self._parts and due:
            with self._timed("save"):
                self._checkpoints.save(record, self._parts)

    def _save_and_end(self, record: Record, notice: TerminationNotice) -> NoReturn:
        """The last act of a run that is ended from outside: what remains of its grace is for this
        checkpoint.
        """
        if not self._parts:
            raise notice.error_with("")
        notice.lost_work = f"; the checkpoint after step {record.next_step} was not whole in time"
        self._checkpoints.save(record, self._parts)
        self._checkpoints.settle()
        saved = notice.error_with(
            f"; saved after step {record.next_step}, the same command goes on"
        )
        print(saved, flush=True)  # a torchrun that was signalled itself does not pass on last words
        raise saved

    def _caveat(self, record: Record) -> str:
        """Why the run will not go on bit for bit as it would have; empty when it will."""
        axes = {
            name: part.placement.axes
            for name, part in self._parts.items()
            if isinstance(part, Handle)
        }
        changes = [
            f"{name} from {_written(record.roles[name])} to {_written(now)}"
            for name, now in axes.items()
            if record.roles.get(name, now) != now
        ]
        if record.seed != self.seed:
            changes.append(f"seed from {record.seed} to {self.seed}")
        for part in self._parts.values():
            if isinstance(part, Handle) and "caveats" in part.endpoints:
                changes += part.caveats.call()
        return (
            f": not bit for bit as it would have gone on ({', '.join(changes)})" if changes else ""
        )

    def _rouse(self, awake: list[Handle]) -> None:
        """Put to sleep who shares ranks with `awake` without being listed, then wake who sleeps."""
        busy = {rank for handle in awake for rank in handle.placement.ranks}
        resting = [
            h for h in self._handles.values() if h not in awake and busy & set(h.placement.ranks)
        ]
        for handle in resting:
            if "sleep" in handle.endpoints and handle.name not in self._asleep:
                with self._timed("sleep"):
                    handle.sleep.call()
                self._asleep.add(handle.name)
        for handle in awake:
            if handle.name in self._asleep:
                with self._timed("wake"):
                    handle.wake.call()
                self._asleep.remove(handle.name)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if self.observer is not None:
            self.observer.on_phase(name, None)
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._board.trace.add(name, round(began * 1e9), now_ns())
            if self._step is not None:
                self._step.phase_s[name] = self._step.phase_s.get(name, 0.0) + seconds
            if self.observer is not None:
                self.observer.on_phase(name, seconds)


def _written(axes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "one rank"
