"""Units of FSDP: modules whose weights are gathered at once, and what is done to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from spmd_rl.model.scorer import Scorer
from spmd_rl.model.value_head import ValueScorer


def forget_pass(units: Sequence[FSDPModule]) -> None:
    """Have FSDP forget a pass that raised.

    FSDP frees no weights of a pass that it takes for unfinished. The next pass would use them, even
    after a load. torch 2.13 has a method for this.
    """
    root = units[-1]
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    for unit in units:
        state = cast(Any, unit)._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._training_state = TrainingState.IDLE


def modules_of_units(scorer: Scorer | ValueScorer, gathers_whole: bool) -> list[nn.Module]:
    """Return the modules to shard: the whole scorer, or each layer and then the rest."""
    return [scorer] if gathers_whole else [*scorer.model.layers, scorer]


def shard(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | None,
    whole: set[nn.Parameter],
) -> list[FSDPModule]:
    """Make each module a unit whose weights are gathered at once, but for those that are whole."""
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=whole or None,
        )
    return [cast(FSDPModule, module) for module in modules]


def mixed_precision(sharded: Iterable[Tensor], dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return the policy: compute in `dtype`, and sum gradients in float32."""
    is_stored_so = all(parameter.dtype == dtype for parameter in sharded)
    return MixedPrecisionPolicy(
        param_dtype=None if is_stored_so else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
