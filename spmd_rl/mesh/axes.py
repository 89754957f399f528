"""Axes of a role: its ranks as a grid, and which of them differ in some axes alone. Pure, no torch.

    pp      stages of a pipeline, slowest; each has some of the layers
    dp      copies of the model, among which data is split
    fsdp    shards of the model or of its optimizer, among which data is split too
    cp      ranks that share the tokens of each sequence
    tp      ranks that share each matrix, fastest

Experts are split along `ep`, which folds dp, fsdp, cp and tp of a stage anew: neighbouring ranks
have different experts or, along `etp`, parts of the same ones. What is left of the fold is `edp`,
the copies of an expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

GRID = ("pp", "dp", "fsdp", "cp", "tp")
EXPERT_GRID = ("pp", "edp", "ep", "etp")
DATA = ("dp", "fsdp")
SHARD = ("pp", "cp", "tp")  # along these, ranks share the work on the same data
# axes of a trainer of Megatron-core; FSDP2 has no pp and no etp, engines have ep or tp
MODEL = (*SHARD, "ep", "etp")
STAGE_ENDS = "stage_ends"  # the first and the last stage, which share a tied embedding
# all sets of axes along which ranks of a model's shard talk to each other
COMMUNICATING: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("cp",),
    DATA,
    ("pp",),
    ("pp", "tp"),
    ("cp", "tp"),
    ("fsdp", "cp"),
    (*DATA, "cp"),
    (*DATA, "cp", "tp"),
    ("ep",),
    ("edp",),
    ("etp",),
    ("ep", "etp"),
    ("pp", "ep", "etp"),
    (STAGE_ENDS,),
)


def size_of(axes: Mapping[str, int], axis: str) -> int:
    """Return the number of ranks along an axis."""
    if axis == "edp":
        num_ranks = prod(axes.get(one, 1) for one in GRID[1:])
        return num_ranks // (axes.get("ep", 1) * axes.get("etp", 1))
    return axes.get(axis, 1)


def ranks_along(
    ranks: Sequence[int], axes: Mapping[str, int], rank: int, along: Sequence[str]
) -> tuple[int, ...]:
    """Return the ranks that differ from `rank` in the axes `along` alone, in their order."""
    if STAGE_ENDS in along:
        stages = ranks_along(ranks, axes, rank, ("pp",))
        return (*stages[:1], *stages[1:][-1:])
    names, grid = _grid(ranks, axes, along)
    (place,) = np.argwhere(grid == rank)
    index = tuple(
        slice(None) if name in along else int(at) for name, at in zip(names, place, strict=True)
    )
    return tuple(int(one) for one in np.sort(grid[index].reshape(-1)))


def _grid(
    ranks: Sequence[int], axes: Mapping[str, int], along: Sequence[str]
) -> tuple[Sequence[str], NDArray[np.int64]]:
    """Return the ranks as a grid that has the axes `along`, and the names of its axes."""
    names = EXPERT_GRID if {"ep", "edp", "etp"} & set(along) else GRID
    return names, np.array(ranks).reshape([size_of(axes, name) for name in names])


def groups_along(
    ranks: Sequence[int], axes: Mapping[str, int], along: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return all such sets of ranks, each once, by their first ranks."""
    if STAGE_ENDS in along:
        return sorted({ranks_along(ranks, axes, rank, along) for rank in ranks})
    names, grid = _grid(ranks, axes, along)
    order = sorted(range(len(names)), key=lambda index: names[index] in along)
    size = prod(size_of(axes, name) for name in names if name in along)
    rows = np.sort(grid.transpose(order).reshape(-1, size))
    return sorted(tuple(row) for row in rows.tolist())


def mesh_axes(axes: Mapping[str, int]) -> list[str]:
    """Return the axes of a role's mesh: those of data, and those along which ranks share."""
    return [axis for axis in GRID if axis in DATA or axes.get(axis, 1) > 1]


def num_groups(ranks: Sequence[int], axes: Mapping[str, int]) -> int:
    """Return how many groups a rank of a role has: one for each axis of its mesh, one of all ranks,
    and those in which ranks of a model's shard talk to each other.
    """
    groups = set[tuple[int, ...]]()
    if any(axes.get(axis, 1) > 1 for axis in MODEL):
        groups = {ranks_along(ranks, axes, ranks[0], along) for along in COMMUNICATING}
    return len(mesh_axes(axes)) + 1 + sum(1 < len(one) < len(ranks) for one in groups)


def communicating_groups(ranks: Sequence[int], axes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return every set of ranks that needs a group of its own: more than one, and not all."""
    found = {group for along in COMMUNICATING for group in groups_along(ranks, axes, along)}
    return sorted(group for group in found if 1 < len(group) < len(ranks))
