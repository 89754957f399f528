"""Process groups of Megatron-core, all of them made by mesh/: it uses no globals of its own."""

from __future__ import annotations

from typing import Any

from spmd_rl.mesh.axes import DATA, STAGE_ENDS
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.held.tensor import Along, Seat

AXES_OF = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": DATA,
    "pp": ("pp",),
    "mp": ("pp", "tp"),
    "tp_cp": ("cp", "tp"),
    "dp_cp": (*DATA, "cp"),
    "tp_dp_cp": (*DATA, "cp", "tp"),
    "intra_dist_opt": (*DATA, "cp", "tp", "pp"),
    "ep": ("ep",),
    "expt_dp": ("edp",),
    "expt_tp": ("etp",),
    "tp_ep": ("ep", "etp"),
    "tp_ep_pp": ("pp", "ep", "etp"),
}


def groups_of(context: RoleContext) -> Any:
    """Return the `ProcessGroupCollection` of this rank.

    Ranks: all of the role. Blocks: no.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = {name: context.axis_group(along) for name, along in AXES_OF.items()}
    groups["intra_dp_cp"], groups["intra_expt_dp"] = groups["dp_cp"], groups["expt_dp"]
    rank, along = context.world.rank, (STAGE_ENDS,)
    ends = context.placement.ranks_along(rank, along)
    is_end = rank in ends
    return ProcessGroupCollection(
        **groups,
        embd=context.axis_group(along) if is_end else None,
        pos_embd=None,
        hcp=None,
        inter_dist_opt=None,
    )


def seat_of(context: RoleContext) -> Seat:
    """Return this rank's place on the axes that cut parameters."""
    tp, ep, etp = (cut_along(context, axis) for axis in ("tp", "ep", "etp"))
    return Seat(tp, ep, etp=etp)


def cut_along(context: RoleContext, axis: str) -> Along:
    """Return how many ranks there are along an axis, and which of them this one is."""
    ranks = context.placement.ranks_along(context.world.rank, (axis,))
    return Along(ranks.index(context.world.rank), len(ranks))
