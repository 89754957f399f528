"""An engine in which every layer sums K of two products in two parts; the trainer's does not.

It stands for an engine with kernels of its own: all it does is round sums in another order.
"""

from __future__ import annotations

from functools import update_wrapper
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import spmd_rl as rl
from spmd_rl.kernels import linear_fp32
from spmd_rl.recipes import policy_run


class SplitK(rl.Rollout):
    """The shipped role with o_proj and down_proj of every layer summed in two parts."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        split_k(self.engine.model)  # type: ignore[attr-defined]


update_wrapper(SplitK.__init__, rl.Rollout.__init__)  # a recipe finds the settings of an engine


def split_k(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if name.endswith((".o_proj", ".down_proj")):
            module.forward = lambda x, module=module: in_two_parts(x, module.weight)


def in_two_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Shape: x [T, K], weight [N, K]; returns [T, N]."""
    half = x.shape[1] // 2
    parts = (slice(half), slice(half, None))
    first, second = (linear_fp32(x[:, part], weight[:, part].contiguous()) for part in parts)
    return (first + second).to(x.dtype)


def run_planted(recipe: ModuleType, ctl: rl.Controller, cfg: Any) -> None:
    with patch.object(policy_run, "Rollout", SplitK), patch.object(rl, "Rollout", SplitK):
        recipe.main(ctl, cfg)
