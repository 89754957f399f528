"""Split of the world: the ranks and mesh axes of each role, from the config and the world size.

A split is one `RoleSplit` per role. Its `ranks` read:

    "all"   every rank of the world: roles that overlap share processes (colocated)
    "4"     the next four ranks that no earlier role with a count took
    "2-5"   ranks two to five, both included

The axis `dp` replicates the model and `fsdp` shards it; data is split over both. Along `tp`, `pp`
and `cp`, ranks share the work on the same data, as a trainer of Megatron-core does (axes.py); one
of FSDP2 has no `pp`. The ranks of an engine share it along `tp`. Along `ep`, ranks of a trainer
share experts, and so do those of native engines. Along `etp`, ranks share each of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from spmd_rl.config.schema import KEYS
from spmd_rl.errors import PlanError
from spmd_rl.mesh.axes import DATA, GRID, MODEL, SHARD, ranks_along

# the keys of a role that help shows, by what the role is; a trainer may have all axes
OF_ENGINE = {KEYS: ("ranks", "dp", "tp", "ep")}
OF_SHARDED = {KEYS: ("ranks", *DATA, "cp", "tp", "ep")}


@dataclass(frozen=True)
class RoleSplit:
    """Ranks and axis sizes of one role; `fsdp = 0` takes whatever the other axes leave."""

    # "all", a count such as "4", or a range such as "2-5"; a count takes the next ranks that no
    # count before took; of a reference or a critic also "": those of the trainer
    ranks: str = "all"
    # copies of the model, among which data is split; an engine has as many as its ranks hold
    dp: int = 1
    # shards of a trainer's model, among which data is split too; 0: all ranks that the other axes
    # leave
    fsdp: int = 0
    # pp is that of a trainer of Megatron-core; an engine has tp:
    tp: int = 1  # ranks that share each matrix
    pp: int = 1  # stages of a pipeline, each with some of the layers
    cp: int = 1  # ranks that share the tokens of each sequence
    ep: int = 1  # ranks, among all of a stage, that share the experts
    etp: int = 1  # ranks that share the matrices of each expert; Megatron-core's alone


@dataclass(frozen=True)
class Split:
    """The split of a trainer and an engine; the default colocates both on every rank."""

    train: RoleSplit = field(default_factory=RoleSplit)
    infer: RoleSplit = field(default_factory=RoleSplit, metadata=OF_ENGINE)


@dataclass(frozen=True)
class PolicySplit(Split):
    """A split that may give ranks of their own to a reference and a critic."""

    OPTIONAL: ClassVar[tuple[str, ...]] = ("reference", "critic")

    reference: RoleSplit = field(default_factory=lambda: RoleSplit(ranks=""), metadata=OF_SHARDED)
    critic: RoleSplit = field(default_factory=lambda: RoleSplit(ranks=""), metadata=OF_SHARDED)


@dataclass(frozen=True)
class SeparateSplit(PolicySplit):
    """A split in which the engine has ranks of its own."""

    SEPARATE: ClassVar[tuple[str, ...]] = ("infer",)

    train: RoleSplit = field(default_factory=lambda: RoleSplit(ranks="1"))
    infer: RoleSplit = field(default_factory=lambda: RoleSplit(ranks="1"), metadata=OF_ENGINE)


@dataclass(frozen=True)
class Placement:
    """Where one role runs: its global ranks in order, and the size of each axis, slowest first."""

    name: str
    ranks: tuple[int, ...]
    axes: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def data_size(self) -> int:
        """The number of shards that data is split into."""
        return self.axes["dp"] * self.axes["fsdp"]

    @property
    def layout(self) -> tuple[Any, ...]:
        """The ranks and their axes. Placements of one layout share their groups."""
        return self.ranks, *self.axes.items()

    @property
    def of_shards(self) -> Placement:
        """The placement as FSDP2 sees it for weights: ranks along cp have shards of their own."""
        cp = self.axes.get("cp", 1)
        others = {axis: size for axis, size in self.axes.items() if axis != "cp"}
        return replace(self, axes=others | {"fsdp": self.axes["fsdp"] * cp})

    def sharding_of_experts(self, is_mixture: bool) -> str:
        """Return the setting by which FSDP2 shards experts among other ranks than all else, such as
        "split.train.ep = 2"; empty where none does.
        """
        for axis in ("ep", "tp") if is_mixture else ("ep",):
            if (size := self.axes.get(axis, 1)) > 1:
                return f"split.{self.name}.{axis} = {size}"
        return ""

    def data_rank(self, rank: int) -> int:
        """Return the shard of `rank`; ranks that differ only in pp, cp and tp share it."""
        return self.ranks_along(rank, DATA).index(rank)

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each shard of the data, in the order of the shards."""
        firsts = self.ranks_along(self.ranks[0], DATA)
        return tuple(self.shard_ranks(rank) for rank in firsts)

    def shard_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share the shard of `rank`, in their order."""
        return self.ranks_along(rank, SHARD)

    def ranks_along(self, rank: int, along: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` in the axes `along` alone (axes.py)."""
        return ranks_along(self.ranks, self.axes, rank, along)

    def require_axes(self, who: str, has: Sequence[str], advice: str) -> None:
        """Raise a PlanError with `advice` if the role has an axis beside those that `who` has."""
        for axis in MODEL:
            if axis not in has and (size := self.axes.get(axis, 1)) > 1:
                listed = f"{', '.join(has[:-1])} and {has[-1]}"
                raise PlanError(
                    f"split.{self.name}.{axis} = {size}: {who} has the axes {listed} alone; "
                    f"{advice}"
                )


class Placements(dict[str, Placement]):
    """Placements by role name, in the order of the split; `placements.train` works too."""

    def __getattr__(self, name: str) -> Placement:
        if name not in self:
            raise AttributeError(f"the split names no role '{name}' (it names {', '.join(self)})")
        return self[name]


def plan_split(split: Any, world_size: int) -> Placements:
    """Place every role of `split` (a dataclass or mapping of `RoleSplit`) on a world of any size.

    A role that the split's class calls `OPTIONAL` has no placement where its ranks are "". One that
    it calls `SEPARATE` shares no rank with another.
    Raises: PlanError with the arithmetic, when ranks or axes do not fit.
    """
    roles: dict[str, RoleSplit] = dict(split if isinstance(split, Mapping) else vars(split))
    optional = getattr(split, "OPTIONAL", ())
    roles = {name: role for name, role in roles.items() if role.ranks or name not in optional}
    ranks_of = _ranks_by_role(roles, world_size)
    num_needed = max((ranks.stop for ranks in ranks_of.values()), default=0)
    _require_world(roles, num_needed, world_size)
    placements = Placements()
    for name, ranks in ranks_of.items():
        axes = _axes(name, roles[name], len(ranks))
        placements[name] = Placement(name, tuple(ranks), axes)
    _require_separate(placements.values(), getattr(split, "SEPARATE", ()))
    return placements


def disjoint(a: Placement, b: Placement) -> bool:
    """Whether no process serves both roles."""
    return not set(a.ranks) & set(b.ranks)


def colocated(a: Placement, b: Placement) -> bool:
    """Whether the same processes serve both roles."""
    return set(a.ranks) == set(b.ranks)


def _ranks_by_role(roles: Mapping[str, RoleSplit], world_size: int) -> dict[str, range]:
    """Return the ranks of each role; roles with a count get them one after another."""
    next_rank = 0  # the first rank that no role with a count has taken
    ranks_of: dict[str, range] = {}
    for name, role in roles.items():
        ranks_of[name] = _ranks(name, role.ranks, next_rank, world_size)
        if role.ranks.isdigit():
            next_rank = ranks_of[name].stop
    return ranks_of


def _ranks(name: str, ranks: str, next_rank: int, world_size: int) -> range:
    """Return the ranks that a role asks for, whether or not the world has them."""
    if ranks == "all":
        return range(world_size)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", ranks)
    if match is None:
        raise PlanError(
            f"split.{name}.ranks = '{ranks}' "
            "is neither 'all', a count like '4' nor a range like '0-3'"
        )
    first, last = match.groups()
    asked = range(int(first), int(last) + 1) if last else range(next_rank, next_rank + int(first))
    if not asked:
        raise PlanError(f"split.{name}.ranks = '{ranks}' is empty")
    return asked


def _require_world(roles: Mapping[str, RoleSplit], num_needed: int, world_size: int) -> None:
    if num_needed > world_size:
        asked = ", ".join(
            f"{name} {role.ranks}" for name, role in roles.items() if role.ranks != "all"
        )
        raise PlanError(
            f"the split asks for {num_needed} ranks ({asked}), and the world has {world_size} "
            "(`run` starts as many as --nproc says)"
        )


def _require_separate(placements: Iterable[Placement], names: tuple[str, ...]) -> None:
    for one in placements:
        for other in placements:
            if one.name in names and one is not other and not disjoint(one, other):
                raise PlanError(
                    f"split.{one.name} shares ranks with split.{other.name}, but this recipe needs "
                    f"them apart: set counts, such as split.{other.name}.ranks = 1 and "
                    f"split.{one.name}.ranks = 1 with --nproc 2"
                )


def _axes(name: str, role: RoleSplit, size: int) -> dict[str, int]:
    """Return the size of each axis: pp, cp, ep and etp only where a role has them."""
    own = {axis: getattr(role, axis) for axis in (*GRID, "ep", "etp")}
    _require_sizes(name, role, own)
    others = math.prod(own[axis] for axis in GRID if axis != "fsdp")
    own["fsdp"] = role.fsdp or max(size // others, 1)
    axes = {axis: own[axis] for axis in own if own[axis] > 1 or axis in ("dp", "fsdp", "tp")}
    grid = [axis for axis in GRID if axis in axes]
    product = math.prod(axes[axis] for axis in grid)
    if product != size:
        arithmetic = " x ".join(f"{axis} {axes[axis]}" for axis in grid)
        raise PlanError(f"split.{name}: {arithmetic} = {product}, but it has {size} ranks")
    if (size // role.pp) % role.ep:
        raise PlanError(
            f"split.{name}.ep = {role.ep} does not divide the {size // role.pp} ranks of a "
            "stage, which share the experts"
        )
    if (size // role.pp) % (role.ep * role.etp):
        raise PlanError(
            f"split.{name}: ep {role.ep} x etp {role.etp} does not divide the {size // role.pp} "
            "ranks of a stage, which share the experts"
        )
    return axes


def _require_sizes(name: str, role: RoleSplit, sizes: Mapping[str, int]) -> None:
    if role.fsdp < 0 or any(sizes[axis] < 1 for axis in sizes if axis != "fsdp"):
        arithmetic = ", ".join(f"{axis} = {value}" for axis, value in sizes.items())
        raise PlanError(f"split.{name} needs fsdp >= 0 and every other axis >= 1, not {arithmetic}")
