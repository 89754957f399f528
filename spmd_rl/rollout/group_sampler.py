"""Group sampler: keeps prompts in generation, and hands out accepted groups step by step."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spmd_rl.controller.pending import CompletionQueue, Pending
from spmd_rl.data.source import DataSource
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.hooks.context import Keep
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.group_queue import NO_SAMPLES, GroupQueue, QueuedGroup, TakenGroups
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.rollout.sampler_config import SamplerConfig
from spmd_rl.rollout.sampler_file import SamplerState, read_state, write_state
from spmd_rl.types.groups import Group


class GroupSampler:
    """Keeps prompts in generation, and hands out accepted groups in the order of their submission.

    Each step of the recipe calls `set_version` after its push, then `take`. `keep` judges a group
    that has ended; one that it rejects, or that has no samples left, is counted by its reason and
    replaced by another prompt. `group_queue.py` says which groups are submitted, and why none gets
    too old.

    The recipe's thread calls all methods. A second thread collects groups and submits prompts while
    the recipe does something else, and calls `keep` there; `take` raises what stopped it. As a part
    in `Controller.resume`, the sampler saves the groups that it holds, half-finished answers, and
    the state of `source`. `shortage` says why the last `take` returned no group; "" if it did.
    """

    def __init__(
        self,
        rollout: Rollout,
        source: DataSource,
        sampling: SamplingConfig,
        cfg: SamplerConfig,
        *,
        groups_per_step: int,
        keep: Callable[[Group], Keep] | None = None,
    ) -> None:
        self._rollout = rollout
        self._source = source
        self._sampling = sampling
        self._cfg = cfg
        self._keep = keep
        self._queue = GroupQueue(cfg, groups_per_step)
        self._calls: CompletionQueue[Group] = CompletionQueue()
        self._running: dict[int, QueuedGroup] = {}  # by the identity of the call
        # calls that were aborted because no step may learn from them
        self._leaving: dict[int, QueuedGroup] = {}
        self._metrics: dict[str, float] = {}
        self._failed: list[Group] = []  # of the last take
        self._stats: Pending[list[dict[str, int]]] | None = None  # of the engines, at the last take
        self._error: BaseException | None = None
        self.shortage = ""
        self._closed = False
        self._recipe_collects = False
        # Guards everything above but `_calls`; it is notified when there is something to collect.
        self._changed = threading.Condition(threading.RLock())
        self._turn = threading.Lock()  # held by the thread that waits for calls
        self._thread = threading.Thread(target=self._run, name="group sampler", daemon=True)

    def set_version(self, version: int) -> None:
        """Note that the engines have the weights of `version`, and submit what this lets in.

        Raises: ContractError when they had later ones; what stopped the sampler's thread.
        """
        with self._changed:
            self._raise_error()
            self._queue.set_version(version)
            self._submit()
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify_all()

    def take(self, step: int) -> list[Group]:
        """Return the groups that step `step` learns from, whose weights have that version.

        Where too many were rejected, there may be fewer, or none at all: `sampler.when_short` says
        which. After none, nothing more is submitted, and `shortage` says why.
        Blocks: until enough groups have ended; the deadline of the oldest call ends it.
        Raises: ContractError for a step that is more than `max_lag` after the last push; SpmdError
        when too many groups were rejected, or there are no more prompts; what stopped the sampler's
        thread, such as an error of `keep` or of the engine.
        """
        taken = self._take(step)
        if taken is None:
            with self._collecting():
                while (taken := self._take(step)) is None:
                    if not len(self._calls):
                        raise self._no_prompts(step)
                    self._collect_next()
        _require_fresh(taken.groups, step, self._cfg.max_lag)
        return taken.groups

    def metrics(self) -> dict[str, float]:
        """Return what the sampler held after the last `take`, and what that has removed.

        Blocks: until every engine has told how many requests waited in it.
        """
        if self._stats is None:
            return {}
        waiting = sum(of_engine["num_waiting"] for of_engine in self._stats.wait())
        return self._metrics | {"rollout/waiting": waiting}

    def failed_groups(self) -> list[Group]:
        """Return the groups with failed samples that were rejected before the last `take`, without
        their other samples: `step.log` counts and shows what failed.
        """
        return self._failed

    def save(self, folder: str) -> None:
        """Write all groups, what there is of unfinished ones, and the state of the source.

        What runs goes on. Blocks: until every engine has told how far its answers are.
        """
        with self._collecting(), self._changed:
            self._raise_error()
            partials = {}
            if self._queue.num_running:
                groups = self._rollout.partials.call()
                partials = {group.prompt.uid: group.samples for group in groups}
            while self._collect_next(0.0):
                pass
            entries = [
                entry if entry.has_ended else entry.stopped(partials.get(entry.prompt.uid))
                for entry in self._queue.entries
            ]
            leaving = [entry.prompt for entry in self._leaving.values()]
            state = SamplerState(self._queue.next_step, entries, leaving, self._source.state())
        write_state(folder, state)

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote; unfinished answers go on after the next push.

        Raises: ConfigError when the files are something else; what `source` raises.
        """
        state = read_state(folder)
        self._source.restore(state.source)
        self._source.give_back(state.leaving)
        self._queue.next_step = state.next_step
        self._queue.restore(state.entries)

    def close(self) -> None:
        """End what runs, and the sampler's thread. Blocks: until the engines have ended it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._calls.wake()
        if self._thread.is_alive():
            self._thread.join()
        for entry in self._running.values():
            _abort(entry)
        while len(self._calls):
            self._calls.wait()

    def _run(self) -> None:
        """Collect and submit whenever the recipe does not."""
        with suppress(BaseException):  # it is kept in `_error`, which the recipe's thread raises
            while self._has_calls():
                with self._turn:
                    self._collect_next()

    def _has_calls(self) -> bool:
        """Wait until there are calls to collect, which the recipe does not; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (len(self._calls) and not self._recipe_collects)
            )
            return not self._closed

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Have the recipe's thread collect what ends, so that its waits are counted as such."""
        self._recipe_collects = True
        self._calls.wake()
        try:
            with self._turn:
                yield
        finally:
            with self._changed:
                self._recipe_collects = False
                self._changed.notify_all()

    def _take(self, step: int) -> TakenGroups | None:
        with self._changed:
            self._raise_error()
            taken = self._queue.take(step)
            if taken is not None:
                self.shortage = "" if taken.groups else taken.shortage
                self._release(taken.surplus)
                self._metrics, self._failed = _measured(self._queue, taken), taken.failed
                if self._cfg.round_tokens:
                    self._metrics["rollout/carried"] = self._queue.num_carried
                self._stats = self._rollout.stats.start()
            elif self._cfg.round_tokens and not self._queue.in_round:
                self._queue.submit(self._source.take(self._queue.num_to_submit()))
                self._queue.begin_round()
            self._submit()
            return taken

    def _release(self, surplus: list[QueuedGroup]) -> None:
        """Give the prompts of these groups back, once their calls have ended."""
        self._source.give_back([entry.prompt for entry in surplus if entry.call is None])
        for entry in surplus:
            if entry.call is not None:
                self._leaving[id(entry.call)] = self._running.pop(id(entry.call))
                _abort(entry)

    def _submit(self) -> None:
        """Submit as many prompts as the queue lets in, and start what may run.

        While prompts are on their way back none is submitted, so that they are the next. Nor is any
        after a step that could learn from none. With rounds, `_take` submits prompts.
        """
        if self._leaving or self._closed or self.shortage:
            return
        if not self._cfg.round_tokens and (num_prompts := self._queue.num_to_submit()):
            self._queue.submit(self._source.take(num_prompts))
        for entry in self._queue.to_start():
            call = self._rollout.complete.start(
                entry.prompt,
                self._sampling,
                partial=entry.partial,
                step=entry.version,
                round_tokens=self._cfg.round_tokens,
            )
            self._queue.start(entry, call)
            self._running[id(call)] = entry
            self._calls.add(call)

    def _collect_next(self, seconds: float | None = None) -> bool:
        """Collect the next call that ends; False if there was none in time, or after a wake.

        Raises: what the call or `keep` raises, and later calls of `take` too.
        """
        try:
            call = self._calls.wait(seconds)
            if call is not None:
                self._collect(call)
        except BaseException as error:
            self._error = error
            raise
        return call is not None

    def _collect(self, call: Pending[Group]) -> None:
        """Take note of a call that has ended, and submit what takes its place."""
        group = call.wait()
        with self._changed:
            if (gone := self._leaving.pop(id(call), None)) is not None:
                self._source.give_back([gone.prompt])
            elif any(sample.status == "aborted" for sample in group.samples):
                self._queue.pause(self._running.pop(id(call)), [*group.samples, *group.failed])
            else:
                self._queue.end(self._running.pop(id(call)), group, _rejection(group, self._keep))
            self._submit()

    def _no_prompts(self, step: int) -> SpmdError:
        failure = self._queue.last_failure
        why = f"; the last sample that failed: {failure}" if failure else ""
        return SpmdError(f"step {step + 1}: there are no more prompts to take{why}")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _rejection(group: Group, keep: Callable[[Group], Keep] | None) -> str:
    """Return why a group is rejected, as the end of a metric's name; "" if it is not."""
    if not group.num_samples:
        return NO_SAMPLES
    if keep is None or (verdict := keep(group)).ok:
        return ""
    return re.sub(r"\W+", "_", verdict.reason.lower()).strip("_") or "keep_group"


def _abort(entry: QueuedGroup) -> None:
    if entry.call is not None:
        entry.call.abort()


def _measured(queue: GroupQueue, taken: TakenGroups) -> dict[str, float]:
    rejected = {f"rollout/rejected_{name}": count for name, count in taken.rejected.items()}
    missing = {"rollout/missing": num_missing} if (num_missing := queue.num_missing(taken)) else {}
    return {
        "rollout/running": queue.num_running,
        "rollout/buffered": queue.num_buffered,
        "rollout/surplus": len(taken.surplus),
        "rollout/rejected": taken.rejected.total(),
        **rejected,
        **missing,
    }


def _require_fresh(groups: list[Group], step: int, max_lag: int) -> None:
    """Raise a ContractError if a token is older than `max_lag` allows."""
    versions = Group.to_columns(groups).samples.versions
    oldest = int(versions[versions >= 0].min(initial=step))
    if step - oldest > max_lag:
        raise ContractError(
            f"step {step + 1} has tokens of version {oldest}, which are older than max_lag = "
            f"{max_lag} allows: call set_version with the version that was pushed"
        )
