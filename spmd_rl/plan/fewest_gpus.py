"""Least number of GPUs for a run: worlds of 1, 2, 4, ... and settings that save memory.

All ranks train and generate, and the trainer is sharded over all of them: no other split of the
same ranks needs less memory on a GPU. In each world the settings of savings.py are tried in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.model.read import read_spec
from spmd_rl.offload.ledger import Ledger, as_size
from spmd_rl.plan.concurrency import longest_sequence
from spmd_rl.plan.needs import INFER, TRAIN, RunNeeds
from spmd_rl.plan.resolve import GPUS_PER_HOST, RunPlan, resolve
from spmd_rl.plan.savings import (
    LEAST_MICRO_BATCH,
    MATRICES,
    MICRO_BATCH,
    SEQUENCES,
    Flags,
    costs,
    key_of,
    layouts,
    savers,
    smaller_batches,
)
from spmd_rl.train.config import megatron_settings
from spmd_rl.train.megatron.exact import has_engine_bits

WORLDS = tuple(2**power for power in range(14))  # 1 to 8,192
Configure = Callable[[Flags], object]  # from flags to the recipe's config


@dataclass(frozen=True)
class Room:
    """What each GPU has, and each host (None: not known)."""

    gpu_bytes: int
    host_bytes: int | None = None
    ranks_per_host: int = GPUS_PER_HOST


@dataclass(frozen=True)
class Attempt:
    """A world with flags: `why_not` says what excludes it, "" where it fits.

    There is no plan where the run's split does not fit the world.
    """

    world_size: int
    flags: Flags
    plan: RunPlan | None
    why_not: str = ""

    @property
    def peak_bytes(self) -> float:
        """The most that any GPU needs."""
        if self.plan is None:
            return inf
        return self.plan.ledgers.most(Ledger.peak_bytes)

    @property
    def lacks_pages(self) -> bool:
        """Whether sequences of a step wait because an engine's pages cannot hold them."""
        return self.plan is not None and self.plan.queue is not None and self.plan.queue.lacks_pages


@dataclass(frozen=True)
class Search:
    """A search for settings with which a run fits. `kept` are those that the run has set itself.

    `report` is told what is tried.
    """

    configure: Configure
    kept: Collection[str]
    room: Room
    report: Callable[[str], None] = field(default=lambda text: None)

    def fewest(self, worlds: tuple[int, ...] = WORLDS) -> list[Attempt]:
        """Return an attempt for each world up to the first that fits, which is the last one.

        A world that does not fit is stated with the flags that need least of a GPU. The search
        ends where a larger world needs more of each GPU; then the last attempt does not fit.
        Raises: ConfigError when the run's own settings are refused; PlanError when it has no model,
        or when no world fits its split.
        """
        tried: list[Attempt] = []
        for world_size in worlds:
            tried.append(self.best(world_size))
            if not tried[-1].why_not or tried[-1].peak_bytes > tried[-2:][0].peak_bytes:
                break
        if all(attempt.plan is None for attempt in tried):
            raise PlanError(tried[-1].why_not)
        return tried

    def without_waiting(self, found_first: Attempt, worlds: Sequence[int]) -> Attempt | None:
        """Return the first world in which no sequence waits for room; None if none is.

        It may have as many GPUs as the first that fits, and then another layout.
        """
        for world_size in (size for size in worlds if size >= found_first.world_size):
            found = self.best(world_size, may_wait=False)
            if not found.why_not:
                return found
        return None

    def best(self, world_size: int, *, may_wait: bool = True) -> Attempt:
        """Return the first attempt that fits or, of those that do not, the one that needs least.

        Raises: as `fewest`.
        """
        failed: list[Attempt] = []
        for layout in layouts(self.kept, world_size):
            self.report(f"trying {world_size:,} GPUs {' '.join(layout)}")
            for saver in savers(self.kept):
                attempt = self._largest_batch((*layout, *saver), world_size, may_wait)
                if attempt is None:
                    if not saver:
                        break  # the recipe does not have this layout, or the model cannot be cut so
                    continue
                if not attempt.why_not:
                    return attempt
                failed.append(attempt)
        return min(failed, key=lambda attempt: attempt.peak_bytes)

    def _largest_batch(self, flags: Flags, world_size: int, may_wait: bool) -> Attempt | None:
        """Return the attempt with the largest micro-batch that fits, or with the smallest one,
        which needs least; None where the flags are refused.
        """
        least = self._attempt((*flags, *self._batches[-1]), world_size, may_wait)
        if least is None:
            return self._attempt(flags, world_size, may_wait) if self._batches[-1] else None
        larger = () if least.why_not else self._batches[:-1]
        attempts = (self._attempt((*flags, *batch), world_size, may_wait) for batch in larger)
        return next((one for one in attempts if one is not None and not one.why_not), least)

    @cached_property
    def _batches(self) -> list[Flags]:
        """The flags of micro-batches that hold every sequence: of the run's own, then smaller."""
        needs = RunNeeds.of(self.configure(()))
        if needs.trainer is None or key_of(MICRO_BATCH) in self.kept:
            return [()]
        least = max(LEAST_MICRO_BATCH, _longest_share(needs))
        return smaller_batches(needs.trainer.max_tokens, least)

    def _attempt(self, flags: Flags, world_size: int, may_wait: bool) -> Attempt | None:
        """Return an attempt; None where the flags are refused. Without `may_wait` it does not fit
        if sequences wait.
        """
        try:
            needs = RunNeeds.of(self.configure(flags))
            if world_size > 1 and _needs_one_shard(needs):
                return None
            cfg = self.configure((*flags, *_with_longest(needs)))
            if _is_left_out(cfg, needs, flags):
                return None
            plan = resolve(
                cfg, world_size, self.room.gpu_bytes, ranks_per_host=self.room.ranks_per_host
            )
        except (ConfigError, PlanError) as error:
            if flags:
                return None
            if isinstance(error, ConfigError):
                raise
            return Attempt(world_size, flags, None, str(error))
        if not plan.ledgers:
            raise PlanError("without a model there is no memory to count: say --model FOLDER")
        attempt = Attempt(world_size, flags, plan, self._why_not(needs, plan))
        if not attempt.why_not and attempt.lacks_pages and not may_wait:
            return replace(attempt, why_not="sequences wait")
        return attempt

    def _why_not(self, needs: RunNeeds, plan: RunPlan) -> str:
        """Return the sum that excludes a plan, "" where it fits."""
        fraction = (
            needs.engine.memory_fraction if needs.engine and INFER in plan.placements else 1.0
        )
        try:
            plan.require(int(self.room.gpu_bytes * fraction))
            if self.room.host_bytes is not None:
                ranks_per_host = min(plan.world_size, self.room.ranks_per_host)
                plan.require_host(self.room.host_bytes, ranks_per_host)
        except PlanError as error:
            return str(error)
        return ""


def lines(tried: list[Attempt]) -> Iterator[str]:
    """Yield what excludes each world, and the flags of the one that fits."""
    for attempt in tried:
        if attempt.why_not:
            with_flags = f" (with {' '.join(attempt.flags)})" if attempt.flags else ""
            yield f"{gpus(attempt):>10}  no: {attempt.why_not}{with_flags}"
        else:
            yield from suffices(attempt, "fits")


def suffices(attempt: Attempt, what: str) -> Iterator[str]:
    """Yield what a world does, with which flags, and what they cost."""
    yield f"{gpus(attempt):>10}  {what}: {flags_of(attempt)}"
    if cost := costs(attempt.flags):
        yield f"{'':12}which costs: {cost}"


def flags_of(attempt: Attempt) -> str:
    """Return the flags that a run gets in this world."""
    return " ".join((f"--nproc {attempt.world_size}", *attempt.flags))


def gpus(attempt: Attempt) -> str:
    """Return the size of a world in words."""
    return f"{attempt.world_size:,} GPU{'s' if attempt.world_size > 1 else ''}"


def why_none(tried: list[Attempt], room: Room) -> str:
    """Return what every GPU holds however many there are, and what would help."""
    best = min(tried, key=lambda attempt: attempt.peak_bytes)
    few = next(attempt.plan for attempt in tried if attempt.plan)
    plan = best.plan
    assert plan is not None
    largest = max(plan.ledgers.of_names.values(), key=Ledger.peak_bytes)
    phase = max(largest.phases, key=largest.resident_bytes)
    needs = (
        f"each needs {as_size(largest.peak_bytes())} in phase {phase}, and may use "
        f"{_usable(plan, room)}"
    )
    if len(tried) == 1:
        return f"{gpus(best)} do not suffice: {needs}; without --world, more are tried"
    alike = {entry for ledger in few.ledgers.of_names.values() for entry in ledger.entries}
    whole = [one for one in largest.counted(phase) if one.num_bytes and one in alike]
    terms = " + ".join(f"{entry.tag} {as_size(entry.num_bytes)}" for entry in whole)
    if len(whole) > 1:
        terms += f" = {as_size(sum(entry.num_bytes for entry in whole))}"
    why = f"no number of GPUs suffices: on {plan.world_size:,}, {needs}; more GPUs do not divide "
    infer = plan.placements.get(INFER)
    has_whole_copy = infer and infer.axes.get("ep", 1) == infer.axes["tp"] == 1
    holds_weights = any(entry.role == INFER and entry.tag == "weights" for entry in whole)
    if not (has_whole_copy and holds_weights):
        return why + terms
    return (
        f"{why}{terms}; each GPU has a whole copy of an engine's weights, which split.infer.tp "
        "divides over several"
    )


def _with_longest(needs: RunNeeds) -> Flags:
    """Return the flags with which micro-batches are counted with room for the longest sequence."""
    longest = _longest_share(needs)
    if needs.trainer is None or needs.trainer.max_tokens >= longest:
        return ()
    return (MICRO_BATCH.format(longest),)


def _is_left_out(cfg: object, needs: RunNeeds, flags: Flags) -> bool:
    """Return whether Megatron-core would share sequences or matrices with other bits than those of
    the engine, in a run that needs equal ones.

    Such layouts are not tried. Raises: ConfigError when the model folder does not serve.
    """
    trainer, train = needs.trainer, getattr(needs.split, TRAIN, None)
    shares = {SEQUENCES, MATRICES} & {key_of(flag) for flag in flags}
    if not shares or trainer is None or trainer.backend.kind == "fsdp2" or not needs.model:
        return False
    is_exact = needs.engine is not None and getattr(getattr(cfg, "run", None), "exact", True)
    axes = {"tp": getattr(train, "tp", 1)}
    has_bits = has_engine_bits(read_spec(needs.model), axes, megatron_settings(trainer))
    return is_exact and not has_bits


def _longest_share(needs: RunNeeds) -> int:
    """Return the tokens that a rank has of the longest sequence, which FSDP2 may share."""
    train = getattr(needs.split, TRAIN, None)
    is_fsdp2 = needs.trainer is not None and needs.trainer.backend.kind == "fsdp2"
    num_sharing = train.cp if is_fsdp2 and isinstance(train, RoleSplit) else 1
    return -(-longest_sequence(needs) // num_sharing)


def _needs_one_shard(needs: RunNeeds) -> bool:
    return needs.trainer is not None and needs.trainer.backend.offload == "master"


def _usable(plan: RunPlan, room: Room) -> str:
    engine = next((role for role in plan.roles if role.name == INFER), None)
    fraction = engine.cfg.memory_fraction if engine else 1.0
    share = f" (engine.memory_fraction = {fraction:g})" if engine else ""
    return f"{as_size(int(room.gpu_bytes * fraction))}{share}"
