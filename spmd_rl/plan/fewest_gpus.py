"""Least number of GPUs for a run: worlds of 1, 2, 4, ... and settings that save memory.

All ranks train and generate, and the trainer is sharded over all of them: no other split of the
same ranks needs less memory on a GPU. Settings that save memory are tried in the order of what they
cost in speed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.offload.ledger import Ledger, as_size
from spmd_rl.plan.resolve import RunPlan, resolve
from spmd_rl.plan.roles import INFER
from spmd_rl.train.config import Fsdp2Config

WORLDS = tuple(2**power for power in range(14))  # 1 to 8,192
GPUS_PER_HOST = 8
Flags = tuple[str, ...]
# flags that save memory, by rising cost
ATTEMPTS: tuple[Flags, ...] = (
    (),
    ("--trainer.backend.recompute=cheap",),
    ("--trainer.backend.recompute=all",),
    ("--trainer.backend.recompute=all", "--trainer.backend.wrap=layer"),
    ("--trainer.backend.offload=moments", "--trainer.backend.recompute=all"),
    ("--trainer.backend.offload=master", "--trainer.backend.recompute=all"),
    (
        "--trainer.backend.offload=master",
        "--trainer.backend.recompute=all",
        "--trainer.backend.offload_activations=true",
    ),
)
Configure = Callable[[Flags], Any]  # from flags to the recipe's config


@dataclass(frozen=True)
class Room:
    """What each GPU has, and each host (None: not known)."""

    gpu_bytes: int
    host_bytes: int | None = None
    ranks_per_host: int = GPUS_PER_HOST


@dataclass(frozen=True)
class Attempt:
    """A world with flags: `why_not` is the sum that excludes it, "" where it fits."""

    flags: Flags
    plan: RunPlan
    why_not: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most that any GPU needs."""
        return max(ledger.peak_bytes() for ledger in self.plan.ledgers.values())


def attempts(kept: Collection[str]) -> list[Flags]:
    """Return the flags of each attempt, without the settings that the run itself has set."""
    free = [
        tuple(flag for flag in flags if flag.removeprefix("--").partition("=")[0] not in kept)
        for flags in ATTEMPTS
    ]
    return list(dict.fromkeys(free))


def fewest_gpus(
    configure: Configure, tries: Sequence[Flags], room: Room, worlds: tuple[int, ...] = WORLDS
) -> list[Attempt]:
    """Return an attempt for each world up to the first that fits, which is the last one.

    A world that does not fit is stated with the flags that need least of a GPU. The search ends
    where a larger world needs more of each GPU; then the last attempt does not fit.
    Raises: ConfigError when the run's own settings are refused; PlanError when it has no model.
    """
    tried: list[Attempt] = []
    for world_size in worlds:
        tried.append(_best(configure, tries, world_size, room))
        if not tried[-1].why_not or tried[-1].peak_bytes > tried[-2:][0].peak_bytes:
            break
    return tried


def lines(tried: list[Attempt]) -> Iterator[str]:
    """Yield what excludes each world, and the flags of the one that fits."""
    for attempt in tried:
        size, flags = attempt.plan.world_size, " ".join(attempt.flags)
        name = f"{size:,} GPU{'s' if size > 1 else ''}"
        if attempt.why_not:
            yield f"{name:>10}  no: {attempt.why_not}{f' (with {flags})' if flags else ''}"
        else:
            yield f"{name:>10}  fits: --nproc {size}{f' {flags}' if flags else ''}"


def _best(configure: Configure, tries: Sequence[Flags], world_size: int, room: Room) -> Attempt:
    """Return the first attempt that fits or, of those that do not, the one that needs least."""
    failed: list[Attempt] = []
    for flags in tries:
        try:
            cfg = configure(flags)
        except ConfigError:
            if not flags:
                raise
            continue  # the recipe does not have these settings, or they exclude each other
        if world_size > 1 and _needs_one_shard(cfg):
            continue
        attempt = _attempt(cfg, flags, world_size, room)
        if not attempt.why_not:
            return attempt
        failed.append(attempt)
    return min(failed, key=lambda attempt: attempt.peak_bytes)


def _attempt(cfg: Any, flags: Flags, world_size: int, room: Room) -> Attempt:
    plan = resolve(cfg, world_size, room.gpu_bytes)
    if not plan.ledgers:
        raise PlanError("without a model there is no memory to count: say --model FOLDER")
    fraction = cfg.engine.memory_fraction if INFER in plan.placements else 1.0
    try:
        plan.require(int(room.gpu_bytes * fraction))
        if room.host_bytes is not None:
            plan.require_host(room.host_bytes, min(world_size, room.ranks_per_host))
    except PlanError as error:
        return Attempt(flags, plan, str(error))
    return Attempt(flags, plan)


def _needs_one_shard(cfg: Any) -> bool:
    backend = getattr(getattr(cfg, "trainer", None), "backend", None)
    return isinstance(backend, Fsdp2Config) and backend.offload == "master"


def why_none(tried: list[Attempt], room: Room) -> str:
    """Return what every GPU holds however many there are, and what would help."""
    few, plan = tried[0].plan, min(tried, key=lambda attempt: attempt.peak_bytes).plan
    largest = max(plan.ledgers.values(), key=Ledger.peak_bytes)
    phase = max(largest.phases, key=largest.resident_bytes)
    alike = {entry for ledger in few.ledgers.values() for entry in ledger.entries}
    whole = [one for one in largest.counted(phase) if one.num_bytes and one in alike]
    terms = " + ".join(f"{entry.tag} {as_size(entry.num_bytes)}" for entry in whole)
    if len(whole) > 1:
        terms += f" = {as_size(sum(entry.num_bytes for entry in whole))}"
    why = (
        f"no number of GPUs suffices: on {plan.world_size:,}, each needs "
        f"{as_size(largest.peak_bytes())} in phase {phase}, and may use {_usable(plan, room)}; "
        f"more GPUs do not divide {terms}"
    )
    if not any(entry.role == INFER and entry.tag == "weights" for entry in whole):
        return why
    return (
        f"{why}; each GPU of an engine has a whole copy of the weights, so this model needs larger "
        "GPUs, or an engine that divides its weights over several GPUs (tensor parallelism), which "
        "is not built"
    )


def _usable(plan: RunPlan, room: Room) -> str:
    engine = next((role for role in plan.roles if role.name == INFER), None)
    fraction = engine.cfg.memory_fraction if engine else 1.0
    share = f" (engine.memory_fraction = {fraction:g})" if engine else ""
    return f"{as_size(int(room.gpu_bytes * fraction))}{share}"
