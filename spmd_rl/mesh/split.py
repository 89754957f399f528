"""Which ranks and axes each role gets, as a pure function of the split and the world size.

A split is one `RoleSplit` per role. Its `ranks` read:

    "all"   every rank of the world: roles that overlap share processes (colocated)
    "4"     the next four ranks that no counted role before it took
    "2-5"   ranks two to five, both included

Axes: `dp` replicates, `fsdp` shards, `tp` is named but not yet built. Data is split over dp x fsdp.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from spmd_rl.errors import PlanError

AXES = ("dp", "fsdp", "tp")


@dataclass(frozen=True)
class RoleSplit:
    """Ranks and axis sizes of one role; `fsdp = 0` takes whatever dp and tp leave."""

    ranks: str = "all"
    dp: int = 1
    fsdp: int = 0
    tp: int = 1


@dataclass(frozen=True)
class Split:
    """The split of a trainer and an engine; the default colocates both on every rank."""

    train: RoleSplit = field(default_factory=RoleSplit)
    infer: RoleSplit = field(default_factory=RoleSplit)


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
        """Into how many shards data is split."""
        return self.axes["dp"] * self.axes["fsdp"]

    def data_rank(self, rank: int) -> int:
        """The shard that global rank `rank` works on; ranks that differ only in tp share it."""
        return self.ranks.index(rank) // self.axes["tp"]


class Placements(Mapping[str, Placement]):
    """Placements by role name, in the split's order; also as attributes: `placements.train`."""

    def __init__(self, placements: list[Placement]) -> None:
        self._by_name = {placement.name: placement for placement in placements}

    def __getitem__(self, name: str) -> Placement:
        return self._by_name[name]

    def __getattr__(self, name: str) -> Placement:
        if name.startswith("_") or name not in self._by_name:
            raise AttributeError(f"the split names no role '{name}' (it names {', '.join(self._by_name)})")
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def plan_split(split: Any, world_size: int) -> Placements:
    """Place every role of `split` (a dataclass or mapping of `RoleSplit`) on a world of any size.

    Raises: PlanError with the arithmetic, when ranks or axes do not fit.
    """
    roles: dict[str, RoleSplit] = dict(split) if isinstance(split, Mapping) else _fields(split)
    taken = 0
    placements = []
    for name, role in roles.items():
        ranks = _ranks(name, role.ranks, taken, world_size)
        if role.ranks.isdigit():
            taken += len(ranks)
        placements.append(Placement(name, ranks, _axes(name, role, len(ranks))))
    return Placements(placements)


def disjoint(a: Placement, b: Placement) -> bool:
    """Whether no process serves both roles."""
    return not set(a.ranks) & set(b.ranks)


def colocated(a: Placement, b: Placement) -> bool:
    """Whether the same processes serve both roles."""
    return set(a.ranks) == set(b.ranks)


def _fields(split: Any) -> dict[str, RoleSplit]:
    return {entry.name: getattr(split, entry.name) for entry in dataclasses.fields(split)}


def _ranks(name: str, ranks: str, taken: int, world_size: int) -> tuple[int, ...]:
    if ranks == "all":
        return tuple(range(world_size))
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", ranks)
    if match is None:
        raise PlanError(f"split.{name}.ranks = '{ranks}' is neither 'all', a count like '4' nor a range like '0-3'")
    if match[2] is None:
        first, last = taken, taken + int(match[1]) - 1
        asked = f"{match[1]} ranks after the {taken} already taken"
    else:
        first, last = int(match[1]), int(match[2])
        asked = f"ranks {ranks}"
    if first > last:
        raise PlanError(f"split.{name}.ranks = '{ranks}' is empty")
    if last >= world_size:
        raise PlanError(f"split.{name} asks for {asked}: that needs {last + 1} ranks, and the world has {world_size}")
    return tuple(range(first, last + 1))


def _axes(name: str, role: RoleSplit, size: int) -> dict[str, int]:
    if role.tp != 1:
        raise PlanError(f"split.{name}.tp = {role.tp}: tensor parallelism is not built yet, use the axes dp and fsdp")
    if role.dp < 1 or role.fsdp < 0:
        raise PlanError(f"split.{name} needs dp >= 1 and fsdp >= 0, not dp = {role.dp}, fsdp = {role.fsdp}")
    axes = {"dp": role.dp, "fsdp": role.fsdp or max(size // role.dp, 1), "tp": role.tp}
    product = math.prod(axes.values())
    if product != size:
        arithmetic = " x ".join(f"{axis} {axes[axis]}" for axis in AXES)
        raise PlanError(f"split.{name}: {arithmetic} = {product}, but it has {size} ranks")
    return axes
