"""Builds a model on the ranks of its role, from a config and a folder: to learn, or frozen."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from spmd_rl.config.combinations import refuse
from spmd_rl.errors import ConfigError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.formats.coded_tensors import as_rounded
from spmd_rl.model.hf import model_weights, random_adapters, random_weights
from spmd_rl.model.peft_folder import read_adapters
from spmd_rl.model.read import head_of, read_spec
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.train.config import FrozenConfig, TrainerConfig, fsdp2_settings
from spmd_rl.train.fsdp2.axes import check_axes, check_frozen_axes
from spmd_rl.train.fsdp2.backend import Fsdp2
from spmd_rl.train.fsdp2.scorers import new_scorer
from spmd_rl.train.fsdp2.sharded_model import ShardedModel
from spmd_rl.train.fsdp2.sharing import Sharing
from spmd_rl.train.learner import Learner
from spmd_rl.train.refusals import HEAD_REFUSED


def build_fsdp2(
    cfg: TrainerConfig, folder: str, context: RoleContext, head: Head, memory: RoleMemory
) -> Learner:
    """Build the model in a Hugging Face folder, sharded over the role's ranks.

    A rank holds its part, and while weights are read one whole tensor at a time. Master weights and
    moments are in regions of `memory`.

    Ranks: all of the role. Raises: ConfigError if the model folder does not serve.
    """
    cfg = replace(cfg, dtype=dtype_of(cfg.dtype, context.device))
    spec = _spec(folder, context)
    check_axes(cfg, context.placement, spec)
    refuse(HEAD_REFUSED, {"trainer": cfg, "model": {"head": head}})
    sharing = Sharing.of(context, spec, fsdp2_settings(cfg).ep_dispatcher)
    mesh = context.shards_mesh()
    backend = Fsdp2(spec, mesh, cfg, context.device, head, memory, sharing, folder)
    weights = first_weights(cfg, folder, head, backend.local)
    if cfg.lora.rank:  # the base never changes, so it is rounded once
        backend.fill(as_rounded(weights, spec, cfg.weights))
        backend.fill(_first_adapters(cfg, spec))
        backend.note_base(context)
    else:
        backend.fill(weights)
    # along cp, a rank has its share of a micro-batch alone
    cp = size_of(context.placement.axes, "cp")
    return Learner(backend, context, replace(cfg, max_tokens=cp * cfg.max_tokens))


def build_frozen(
    cfg: FrozenConfig, folder: str, context: RoleContext, memory: RoleMemory | None = None
) -> ShardedModel:
    """Build the model in a Hugging Face folder, sharded, in the dtype that it computes in.

    It has the head that the folder's config.json names. Its weights are in a region of `memory`, if
    there is one.

    Ranks: all of the role. Raises: ConfigError if the model folder does not serve.
    """
    spec, head = _spec(folder, context), head_of(folder)
    check_frozen_axes(cfg, context.placement, spec)
    dtype = getattr(torch, dtype_of(cfg.dtype, context.device))
    sharing = Sharing.of(context, spec)
    scorer = new_scorer(spec, folder, cfg, head, sharing.part).requires_grad_(False)
    for parameter in scorer.parameters():  # and no buffers, which have dtypes of their own
        parameter.data = parameter.data.to(dtype)
    memory = memory or RoleMemory(None, context.device)
    backend = ShardedModel(
        scorer,
        context.shards_mesh(),
        context.device,
        dtype,
        cfg.gathers_whole,
        allocating=lambda is_base, sizes: memory.allocating("weights", sizes),
        sharing=sharing,
    )
    memory.hold("weights", lambda: backend.local.values())
    backend.fill(as_rounded(first_weights(cfg, folder, head, backend.local), spec, cfg.weights))
    return backend


def first_weights(
    cfg: TrainerConfig | FrozenConfig, folder: str, head: Head, held: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights that a model begins with, by name; with `held`, those of these names.

    Raises: as `model_weights`.
    """
    spec = read_spec(folder)
    if spec.impl == "transformers":
        from spmd_rl.model.foreign.weights import foreign_weights

        return foreign_weights(folder, cfg.seed if cfg.init == "random" else None)
    if cfg.init == "random":
        return random_weights(spec, cfg.seed, head, held)
    return model_weights(folder, spec.parameter_shapes(head), held)


def _first_adapters(cfg: TrainerConfig, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters that a trainer begins with. Raises: as `read_adapters`."""
    if cfg.lora.folder:
        return read_adapters(cfg.lora, spec)
    return random_adapters(cfg.lora.shapes(spec), cfg.seed)


def _spec(folder: str, context: RoleContext) -> ModelSpec:
    """Return the model of a folder, with the arithmetic of this run."""
    if not folder:
        raise ConfigError("model is empty: name a Hugging Face model folder")
    shards = max(context.row_shards, size_of(context.placement.axes, "tp"))
    return replace(read_spec(folder), row_shards=shards)
