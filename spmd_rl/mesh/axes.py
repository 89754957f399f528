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
    names = EXPERT_GRID if {"ep", "edp", "etp"} & set(along) else GRID
    grid = np.array(ranks).reshape([size_of(axes, name) for name in names])
    (place,) = np.argwhere(grid == rank)
    index = tuple(
        slice(None) if name in along else int(at) for name, at in zip(names, place, strict=True)
    )
    return tuple(int(one) for one in np.sort(grid[index].reshape(-1)))


def groups_along(
    ranks: Sequence[int], axes: Mapping[str, int], along: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return all such sets of ranks, each once, by their first ranks."""
    return sorted({ranks_along(ranks, axes, rank, along) for rank in ranks})


def communicating_groups(ranks: Sequence[int], axes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return every set of ranks that needs a group of its own: more than one, and not all."""
    found = {group for along in COMMUNICATING for group in groups_along(ranks, axes, along)}
    return sorted(group for group in found if 1 < len(group) < len(ranks))
