"""Memory of a planned run: the ledger of each rank, from the roles that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from spmd_rl.mesh.axes import num_groups
from spmd_rl.mesh.split import Placement, Placements, disjoint
from spmd_rl.offload.gpu_overhead import Peers, gpu_overhead
from spmd_rl.offload.ledger import Entry, Ledger, TagBytes
from spmd_rl.offload.phases import ALL, Phases, Tags
from spmd_rl.plan.needs import INFER, TRAIN
from spmd_rl.plan.push import Push
from spmd_rl.plan.roles import PlannedRole
from spmd_rl.rollout.memory import KV

ALWAYS = ("run",)  # the one phase of a recipe whose roles are all awake at once
Sleeping = Mapping[str, Tags]  # by role: the tags that sleep in phases which do not need them
Key = tuple[tuple[int, ...], ...]  # what roles that share process groups have in common
Names = tuple[str, ...]  # of the placements that a rank belongs to


@dataclass(frozen=True)
class Ledgers(Mapping[int, Ledger]):
    """The ledger of each rank. Ranks of the same placements share one, so that a plan costs no more
    in a larger world.
    """

    of_names: Mapping[Names, Ledger] = field(default_factory=dict)
    names: tuple[Names, ...] = ()  # by rank

    def __getitem__(self, rank: int) -> Ledger:
        return self.of_names[self.names[rank]]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.names)))

    def __len__(self) -> int:
        return len(self.names)

    def distinct(self) -> Iterator[tuple[int, Ledger]]:
        """Yield each ledger once, with the first rank that has it."""
        return ((self.names.index(names), ledger) for names, ledger in self.of_names.items())

    def most(self, size: Callable[[Ledger], int]) -> int:
        """Return the largest size of a ledger."""
        return max(map(size, self.of_names.values()))

    def kv_sized(self, num_bytes: int) -> Ledgers:
        """Return ledgers in which an engine's pages have this size."""
        sized = {names: one.sized(KV, num_bytes) for names, one in self.of_names.items()}
        return Ledgers(sized, self.names)


@dataclass(frozen=True)
class MemoryModel:
    """What the ledgers of a run follow from, whatever sleeps. `on_gpu` counts CUDA and NCCL."""

    world_size: int
    placements: Placements
    roles: tuple[PlannedRole, ...]
    phases: Phases
    push: Push | None
    on_gpu: bool
    ranks_per_host: int

    @property
    def phase_names(self) -> tuple[str, ...]:
        return self.phases.names or ALWAYS

    @cached_property
    def memory(self) -> dict[str, Sequence[TagBytes]]:
        """What each role takes of one of its ranks; an engine's pages have no size yet."""
        return {role.name: role.memory(self.on_gpu) for role in self.roles}

    @cached_property
    def names(self) -> tuple[Names, ...]:
        """The placements of each rank."""
        ranks = {name: set(placement.ranks) for name, placement in self.placements.items()}
        return tuple(
            tuple(name for name in ranks if rank in ranks[name]) for rank in range(self.world_size)
        )

    @cached_property
    def _shared(self) -> dict[Names, tuple[Entry, ...]]:
        """What the ranks of the same placements hold beside their roles, whatever sleeps: the
        buckets of a push, and the GPU's own memory.
        """
        num_communicators, push = self._num_communicators(), self.push
        shared: dict[Names, tuple[Entry, ...]] = {}
        for rank, names in enumerate(self.names):
            if names in shared:
                continue
            packed = 0 if push is None else push.packed_bytes(rank)
            shared[names] = (Entry("buckets", packed, self._push_phases()),)
            if self.on_gpu:
                num_rings, peers = _connections(self._here(names))
                peers += [] if push is None else [push.peers(rank)]
                shared[names] += gpu_overhead(
                    num_communicators, num_rings, peers, self.ranks_per_host
                )
        return shared

    def ledgers(self, sleeping: Sleeping) -> Ledgers:
        """Return each rank's ledger: its roles, the buckets of a push, and the GPU's own memory."""
        of_names = {}
        for names, shared in self._shared.items():
            of_roles = (self._entries(role, sleeping) for role in self._here(names))
            entries = (*chain.from_iterable(of_roles), *shared)
            of_names[names] = Ledger(entries, phases=self.phase_names)
        return Ledgers(of_names, self.names)

    def _here(self, names: Names) -> list[PlannedRole]:
        """Return the roles on these placements."""
        return [role for role in self.roles if role.placement.name in names]

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
        """Return how many communicators NCCL makes: the world's, and those of each placement.

        A link is placed too, on ranks of one axis.
        """
        distinct = {_key(one): num_groups(one.ranks, one.axes) for one in self.placements.values()}
        if train := self.placements.get(TRAIN):
            linked = [role.placement for role in self.roles if role.is_refreshed]
            if self.push is not None:
                linked.append(self.placements.infer)
            for placement in linked:
                ranks = tuple(sorted({*train.ranks, *placement.ranks}))
                axes = {"dp": len(ranks), "fsdp": 1, "tp": 1}
                distinct[ranks, tuple(axes.values())] = num_groups(ranks, axes)
        return 1 + sum(distinct.values())


def _connections(roles: Sequence[PlannedRole]) -> tuple[int, list[Peers]]:
    """Return the rings that gradients and weights go around, and whom rows are sent to.

    Roles on the same ranks and axes share their connections.
    """
    meshes = [role for role in roles if role.has_mesh]
    placed = {_key(role.placement): role.placement for role in meshes}
    peers = {(_key(role.placement), one) for role in meshes for one in role.exchanges}
    num_rings = sum(size > 1 for one in placed.values() for size in one.axes.values())
    return num_rings, [one for _, one in peers]


def _key(placement: Placement) -> Key:
    return placement.ranks, tuple(placement.axes.values())
