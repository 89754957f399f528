"""Builds a model of Megatron-core on the ranks of its role, from a config and a folder."""

from __future__ import annotations

from dataclasses import replace

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.parts.part import most_row_shards
from spmd_rl.model.read import read_spec
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.build import first_weights
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.learner import Learner
from spmd_rl.train.megatron.backend import Megatron


def build_megatron(
    cfg: TrainerConfig, folder: str, context: RoleContext, memory: RoleMemory
) -> Learner:
    """Build the model in a Hugging Face folder, cut along the axes of the role.

    Master weights and moments are in regions of `memory`.

    Ranks: all of the role. Raises: ConfigError if the model folder does not serve.
    """
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, context.device))
    shards = most_row_shards(context.row_shards, context.placement.axes["tp"])
    spec = replace(read_spec(folder), row_shards=shards)
    megatron = Megatron(spec, context, cfg, memory)
    megatron.fill(first_weights(cfg, folder, "lm"))
    return Learner(megatron, context, cfg)
