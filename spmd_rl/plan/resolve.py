"""Plan of a run: from a recipe's config and a world size to plain data.

The plan reads what `RunNeeds` has of the config: `split` places roles, `model` gives shapes,
`trainer` and `engine` say how the roles hold them. `phases` says which memory a phase needs, and
`offload` whether the rest sleeps. `extra_roles()` lists the roles besides (train/extra_role.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.axes import MODEL, groups_along
from spmd_rl.mesh.split import Placement, Placements, disjoint, plan_split
from spmd_rl.model.formats.coded_cache import format_sentences
from spmd_rl.model.parts.part import most_row_shards
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import as_size
from spmd_rl.plan.axes import check_axes, check_together
from spmd_rl.plan.concurrency import Queue, num_asked, running
from spmd_rl.plan.memory import Ledgers, MemoryModel
from spmd_rl.plan.needs import INFER, TRAIN, RunNeeds
from spmd_rl.plan.push import Push, push_of_run
from spmd_rl.plan.roles import PlannedRole, planned_roles, uncounted
from spmd_rl.plan.sleep import Need, SleepDecision, choose_sleep, copied_bytes, everything
from spmd_rl.rollout.memory import kv_bytes, running_kv_bytes, sequence_kv_bytes

GPUS_PER_HOST = 8  # where nobody says how many


@dataclass(frozen=True)
class RunPlan:
    """All that is known of a run before it starts. `ledgers` go by rank.

    Where the model is not known, there is no `memory` and there are no ledgers. Without an engine
    there is no `queue`.
    """

    world_size: int
    placements: Placements
    spec: ModelSpec | None
    push: Push | None = None
    ledgers: Ledgers = field(default_factory=Ledgers)
    memory: MemoryModel | None = None
    sleep: SleepDecision = field(default_factory=lambda: SleepDecision({}))
    uncounted: tuple[str, ...] = ()
    formats: Mapping[str, str] = field(default_factory=dict)  # what to say of what is in few bits
    queue: Queue | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the ledgers count what a GPU itself takes."""
        return self.memory is not None and self.memory.on_gpu

    @property
    def roles(self) -> tuple[PlannedRole, ...]:
        return self.memory.roles if self.memory else ()

    @property
    def groups(self) -> list[tuple[str, tuple[int, ...]]]:
        """Process groups by name: each role's mesh axes with several ranks, and the link."""
        groups = [
            (f"{placement.name}.{axis}", ranks)
            for placement in self.placements.values()
            for axis, ranks in _axis_groups(placement)
        ]
        if self.push is not None:
            groups.append(("link", self.push.ranks))
        return groups

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that serve no role."""
        busy = {rank for placement in self.placements.values() for rank in placement.ranks}
        return tuple(rank for rank in range(self.world_size) if rank not in busy)

    def reserved_bytes(self) -> int:
        """Return what is planned beside an engine's pages at most, on any of its ranks."""
        return max(
            ledger.beside_bytes("kv")
            for names, ledger in self.ledgers.of_names.items()
            if INFER in names
        )

    def require(self, capacity_bytes: int) -> None:
        """Raise a PlanError with the sum of the first rank and phase that do not fit, if any; or
        where they fit only if more sleeps than the host can keep.
        """
        if self.sleep.host_problem:
            raise PlanError(self.sleep.host_problem)
        for rank, ledger in self.ledgers.distinct():
            try:
                ledger.require(capacity_bytes)
            except PlanError as error:
                raise PlanError(f"rank {rank}: {error}") from None

    def require_host(self, host_bytes: int, ranks_per_host: int) -> None:
        """Raise a PlanError if the ranks of a host need more than its memory."""
        for rank, ledger in self.ledgers.distinct():
            if (needed := ledger.host_bytes() * ranks_per_host) > host_bytes:
                terms = " + ".join(
                    f"{entry.tag} {as_size(entry.host_bytes)}"
                    for entry in ledger.entries
                    if entry.host_bytes
                )
                raise PlanError(
                    f"rank {rank} keeps {terms} in host memory; {ranks_per_host} such ranks take "
                    f"{as_size(needed)}, and a host has {as_size(host_bytes)}"
                )


def resolve(
    cfg: object,
    world_size: int,
    capacity_bytes: int | None = None,
    host_bytes: int | None = None,
    ranks_per_host: int = GPUS_PER_HOST,
) -> RunPlan:
    """Return the plan of a run on devices of `capacity_bytes`, whose ranks may keep `host_bytes` in
    host memory each. None is what is not known; `offload.host_gib` goes first.

    Raises: PlanError when the split does not fit; ConfigError when the model folder does not serve.
    """
    needs = RunNeeds.of(cfg)
    placements = _placements(needs, world_size)
    if not needs.model:
        return RunPlan(world_size, placements, None)
    spec = read_spec(needs.model)
    roles = planned_roles(placements, needs, row_shards(cfg, world_size))
    memory = MemoryModel(
        world_size,
        placements,
        roles,
        needs.phases,
        push_of_run(placements, spec, needs),
        on_gpu=any(role.computes_on_gpu for role in roles),
        ranks_per_host=ranks_per_host,
    )
    sleep = _decide(needs, memory, spec, capacity_bytes, host_bytes)
    ledgers = memory.ledgers(sleep.sleeping)
    plan = RunPlan(world_size, placements, spec, memory.push, ledgers, memory, sleep)
    plan = replace(plan, uncounted=uncounted(placements, roles))
    if INFER not in placements or needs.engine is None:
        return plan
    infer, engine = placements.infer, needs.engine
    tp = infer.axes["tp"]
    page_bytes = kv_bytes(spec, engine, capacity_bytes, plan.reserved_bytes(), tp)
    sequences = running(needs, engine, infer, spec)
    num_held = page_bytes // sequence_kv_bytes(spec, engine, sequences.num_tokens, tp)
    queue = Queue(num_asked(needs, engine, infer), sequences, num_held)
    ledgers = ledgers.kv_sized(page_bytes)
    return replace(plan, ledgers=ledgers, queue=queue, formats=format_sentences(engine))


def _decide(
    needs: RunNeeds,
    memory: MemoryModel,
    spec: ModelSpec,
    capacity_bytes: int | None,
    host_bytes: int | None,
) -> SleepDecision:
    """Return what sleeps: as `offload.sleep` says or, with "auto", as little as fits.

    Where the GPU is not known, "auto" is planned with all that may sleep.
    """
    setting = needs.offload.sleep
    all_that_may = everything(memory)
    if setting == "never":
        return SleepDecision({}, "nothing sleeps: offload.sleep = never")
    if not any(all_that_may.values()):
        return SleepDecision({})
    copied = copied_bytes(memory, all_that_may)
    if setting == "always":
        return SleepDecision(all_that_may, "roles sleep in turn: offload.sleep = always", copied)
    if not memory.on_gpu:
        return SleepDecision({}, "nothing sleeps: on CPUs, memory is not given back")
    if capacity_bytes is None:
        return SleepDecision(all_that_may, "", copied)
    need = _need(needs, memory, spec, capacity_bytes)
    return choose_sleep(memory, replace(need, host_bytes=needs.offload.host_bytes or host_bytes))


def _need(needs: RunNeeds, memory: MemoryModel, spec: ModelSpec, capacity_bytes: int) -> Need:
    engine = needs.engine
    if INFER not in memory.placements or engine is None:
        return Need(capacity_bytes)
    infer = memory.placements.infer
    sequences = running(needs, engine, infer, spec)
    pages = running_kv_bytes(
        spec, engine, sequences.num_sequences, sequences.num_tokens, infer.axes["tp"]
    )
    return Need(int(capacity_bytes * engine.memory_fraction), pages, sequences)


def _placements(needs: RunNeeds, world_size: int) -> Placements:
    """Return where the config's split places its roles. Raises: PlanError when it has no split."""
    if needs.split is None:
        raise PlanError("this recipe's config has no `split`, so there is nothing to plan")
    placements = plan_split(needs.split, world_size)
    check_axes(needs, placements)
    return placements


def planned_settings(
    cfg: object,
    world_size: int,
    capacity_bytes: int | None = None,
    ranks_per_host: int = GPUS_PER_HOST,
) -> Mapping[str, Mapping[str, int]]:
    """Return the settings that the plan adds to a spawn, by the name of the placement.

    An engine gets the bytes that the ledger counts beside its pages. It gets none where their
    number is set, or where a role that the ledger does not know shares its ranks. A plan that
    fails adds nothing here: the run itself reports the error.
    """
    engine = RunNeeds.of(cfg).engine
    if engine is None or engine.num_pages:
        return {}
    try:
        plan = resolve(cfg, world_size, capacity_bytes, ranks_per_host=ranks_per_host)
    except (ConfigError, PlanError):
        return {}
    infer = plan.placements.get(INFER)
    if infer is None or not plan.ledgers:
        return {}
    unknown = [plan.placements.get(name) for name in plan.uncounted]
    unknown += [role.placement for role in plan.roles if not role.is_counted]
    if any(placement and not disjoint(infer, placement) for placement in unknown):
        return {}
    return {INFER: {"reserved_bytes": plan.reserved_bytes()}}


def row_shards(cfg: object, world_size: int) -> Mapping[str, int]:
    """Return in how many parts the models of each placement sum row-parallel products: as many as
    ranks share one, in a trainer that sums in parts or an engine whose bits are the trainer's, or
    as many as `run.row_shards` says. None are named where this is 1.

    Raises: ConfigError as `check_together`.
    """
    needs = RunNeeds.of(cfg)
    if needs.split is None:
        return {}
    try:
        placements = plan_split(needs.split, world_size)
    except PlanError:  # the run itself reports it
        return {}
    check_together(needs, placements)
    of_bits = {
        INFER: needs.engine and needs.engine.promises_bits,
        TRAIN: needs.trainer and needs.trainer.backend.sums_in_parts,
    }
    sizes = [one.axes["tp"] for name, one in placements.items() if of_bits.get(name)]
    size = needs.run.row_shards or most_row_shards(*sizes)
    return dict.fromkeys(placements, size) if size > 1 else {}


def _axis_groups(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups of ranks that differ in one axis alone, for axes of more than one rank."""
    return [
        (axis, ranks)
        for axis in ("fsdp", "dp", *MODEL)
        if placement.axes.get(axis, 1) > 1
        for ranks in groups_along(placement.ranks, placement.axes, (axis,))
    ]
