"""Memory of a planned run: the ledger of each rank, from the roles that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from spmd_rl.mesh.split import Placement, Placements, disjoint
from spmd_rl.offload.gpu_overhead import gpu_overhead
from spmd_rl.offload.ledger import Entry, Ledger, TagBytes
from spmd_rl.offload.phases import ALL, Phases, Tags
from spmd_rl.plan.roles import INFER, TRAIN, PlannedRole
from spmd_rl.plan.routes import Routes
from spmd_rl.rollout.memory import KV

ALWAYS = ("run",)  # the one phase of a recipe whose roles are all awake at once
Sleeping = Mapping[str, Tags]  # by role: the tags that sleep in phases which do not need them
Key = tuple[tuple[int, ...], ...]  # what roles that share process groups have in common


@dataclass(frozen=True)
class MemoryModel:
    """What the ledgers of a run follow from, whatever sleeps. `on_gpu` counts CUDA and NCCL."""

    world_size: int
    placements: Placements
    roles: tuple[PlannedRole, ...]
    phases: Phases
    routes: Routes
    on_gpu: bool

    @property
    def phase_names(self) -> tuple[str, ...]:
        return self.phases.names or ALWAYS

    @cached_property
    def memory(self) -> dict[str, Sequence[TagBytes]]:
        """What each role takes of one of its ranks; an engine's pages have no size yet."""
        return {role.name: role.memory(self.on_gpu) for role in self.roles}

    def ledgers(self, sleeping: Sleeping) -> dict[int, Ledger]:
        """Return each rank's ledger: its roles, the buckets of a push, and the GPU's own memory."""
        num_communicators = self._num_communicators()

        @cache
        def of_roles(names: tuple[str, ...]) -> tuple[Ledger, int, int]:
            """Return the ledger of the roles on these placements, and their rings and peers."""
            here = [role for role in self.roles if role.placement.name in names]
            entries = tuple(entry for role in here for entry in self._entries(role, sleeping))
            return Ledger(entries, phases=self.phase_names), *_connections(here)

        ranks = {name: set(placement.ranks) for name, placement in self.placements.items()}
        ledgers = {}
        for rank in range(self.world_size):
            names = tuple(name for name in ranks if rank in ranks[name])
            ledger, num_rings, num_peers = of_roles(names)
            ledger += [Entry("buckets", self.routes.packed_bytes(rank), self._push_phases())]
            if self.on_gpu:
                num_peers += self.routes.num_peers(rank)
                ledger += gpu_overhead(num_communicators, num_rings, num_peers)
            ledgers[rank] = ledger
        return ledgers

    def sleepers(self) -> list[PlannedRole]:
        """Return the roles that can sleep, and that the declaration lets sleep."""
        named = self.phases.roles
        return [role for role in self.roles if role.name in named and role.can_sleep]

    def sleep_phases(self, role: PlannedRole, tag: str) -> tuple[str, ...]:
        """Return the phases in which memory under `tag` of a role may sleep.

        A role sleeps only where another role of its ranks is awake.
        """
        beside = [
            other.name
            for other in self.roles
            if other is not role and not disjoint(role.placement, other.placement)
        ]
        awake = self.phases.awake
        return tuple(
            phase
            for phase in self.phases.names
            if not self.phases.is_awake(phase, role.name, tag)
            and any(awake[phase].get(name) for name in beside)
        )

    def _entries(self, role: PlannedRole, sleeping: Sleeping) -> Iterator[Entry]:
        for item in self.memory[role.name]:
            tag, num_bytes = item.tag, item.num_bytes
            if role.name == INFER and tag == "weights" and self._shares_weights(role, sleeping):
                num_bytes = 0
            sleeps = tag in sleeping.get(role.name, ())
            saved = num_bytes if sleeps and item.kind == "save" else 0
            yield Entry(
                f"{role.name} {tag}" if role.is_extra else tag,
                num_bytes,
                self._phases_of(role, item, sleeps),
                role.name,
                item.kind == "work",
                max(saved, item.host_bytes),
            )

    def _phases_of(self, role: PlannedRole, item: TagBytes, sleeps: bool) -> tuple[str, ...] | None:
        """Return the phases in which bytes are resident; None for all."""
        computing = self._computing(role)
        if item.kind == "work":
            return computing
        away = set(computing) if item.is_away_in_work else set()
        if sleeps:
            away |= set(self.sleep_phases(role, item.tag))
        return tuple(phase for phase in self.phase_names if phase not in away) if away else None

    def _computing(self, role: PlannedRole) -> tuple[str, ...]:
        """Return the phases in which a role may compute: it is awake as a whole."""
        if not any(role.name in roles for roles in self.phases.awake.values()):
            return self.phase_names
        return tuple(
            name
            for name in self.phases.names
            if set(ALL) & set(self.phases.awake[name].get(role.name, ()))
        )

    def _push_phases(self) -> tuple[str, ...] | None:
        """Return the phases in which a trainer may push: it and the engine are both awake."""
        if not self.phases.names:
            return None
        return tuple(
            name for name, roles in self.phases.awake.items() if {TRAIN, INFER} <= {*roles}
        )

    def _shares_weights(self, engine: PlannedRole, sleeping: Sleeping) -> bool:
        """Whether an engine's weights are the trainer's memory. Roles that sleep have their own."""
        train = self.placements.get(TRAIN)
        return (
            not any(sleeping.values())
            and "slab" not in {item.tag for item in self.memory[INFER]}
            and not engine.computes_on_gpu
            and train is not None
            # the base beside adapters
            and {"base", "pushed_base"}.isdisjoint(item.tag for item in self.memory[TRAIN])
            and train.of_shards.axes["fsdp"] == train.axes["tp"] == engine.placement.axes["tp"] == 1
            and any(role.name == TRAIN and role.holds_whole_tensors for role in self.roles)
            and set(engine.placement.ranks) <= set(train.ranks)
        )

    def _num_communicators(self) -> int:
        """Return how many communicators NCCL makes: the world's, and three for each placement.

        The three are those of its axes dp and fsdp, and of all its ranks. A link is placed too.
        """
        distinct = {_key(placement) for placement in self.placements.values()}
        if train := self.placements.get(TRAIN):
            linked = [role.placement for role in self.roles if role.is_refreshed]
            if self.routes:
                linked.append(self.placements.infer)
            for placement in linked:
                ranks = tuple(sorted({*train.ranks, *placement.ranks}))
                distinct.add((ranks, (len(ranks), 1, 1)))
        return 1 + 3 * len(distinct)


def kv_sized(ledgers: dict[int, Ledger], num_bytes: int) -> dict[int, Ledger]:
    """Return ledgers in which an engine's pages have this size."""
    return {rank: ledger.sized(KV, num_bytes) for rank, ledger in ledgers.items()}


def _connections(roles: Sequence[PlannedRole]) -> tuple[int, int]:
    """Return the rings that gradients and weights go around, and the peers that rows are sent to.

    Roles on the same ranks and axes share their connections.
    """
    placed: dict[Key, Placement] = {}
    peers: dict[Key, int] = {}
    for role in (one for one in roles if one.has_mesh):
        key = _key(role.placement)
        placed[key], peers[key] = role.placement, max(peers.get(key, 0), role.num_peers)
    num_rings = sum(size > 1 for one in placed.values() for size in one.axes.values())
    return num_rings, sum(peers.values())


def _key(placement: Placement) -> Key:
    return placement.ranks, tuple(placement.axes.values())
