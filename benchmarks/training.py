"""Shared parts of the training benchmarks: a learner with a Qwen3 shape, and a batch."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.shapes import random_weights, write_config
from spmd_rl.algo.packing import pack
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, Split, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.fsdp2.backend import Fsdp2
from spmd_rl.train.fsdp2.sharing import Sharing
from spmd_rl.train.learner import Learner
from spmd_rl.train.megatron.backend import Megatron
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

PROMPT_TOKENS, NEW_TOKENS = 128, 896
PACK_TOKENS = 16384
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, node=0, run_id="benchmark", restart=0)


ALL_RANKS = RoleSplit()


def config(name: str) -> TrainerConfig:
    """Return a config that keeps all activations if they fit; at 4B, it recomputes some."""
    return TrainerConfig(
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
        max_tokens=PACK_TOKENS,
        backend=Fsdp2Config(recompute="cheap" if name == "4B" else "none"),
    )


def spec_of(name: str) -> ModelSpec:
    """Return the specification of a shape, as `shapes.config` knows them."""
    with tempfile.TemporaryDirectory() as folder:
        return write_config(name, Path(folder))


def learner(
    name: str, cfg: TrainerConfig, world: World = ALONE, axes: RoleSplit = ALL_RANKS
) -> Learner:
    """Return a learner of this shape with random weights, over all ranks of the world."""
    if not dist.is_initialized():
        join(world, open_store(world) if world.size > 1 else dist.HashStore())
    placement = plan_split(Split(train=axes), world.size)["train"]
    meshes = Meshes(world)
    meshes.build([placement])
    return learner_in(meshes.context(placement), spec_of(name), cfg)


def learner_in(context: RoleContext, spec: ModelSpec, cfg: TrainerConfig) -> Learner:
    """Return a learner of this model with random weights, over the ranks of a context.

    It is frozen for Python's garbage collector, as the roles of a rank are.
    """
    release()
    backend: Fsdp2 | Megatron
    if isinstance(cfg.backend, MegatronConfig):
        backend = Megatron(spec, context, cfg)
    else:
        sharing = Sharing.of(context, spec, cfg.backend.ep_dispatcher)
        mesh = context.shards_mesh()
        backend = Fsdp2(spec, mesh, cfg, context.device, sharing=sharing)
    backend.fill(random_weights(spec))
    made = Learner(backend, context, cfg)
    gc.collect()
    gc.freeze()
    return made


def release() -> None:
    """Free what is left of learners that nothing refers to."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def batch(num_tokens: int, vocab: int, length: int = PROMPT_TOKENS + NEW_TOKENS) -> Batch:
    """Return sequences of `length` tokens, 128 of which are a prompt, with random advantages."""
    rng = np.random.default_rng(0)
    new_tokens = length - PROMPT_TOKENS
    groups = [_group(uid, new_tokens, vocab, rng) for uid in range(num_tokens // length)]
    return pack(groups, [rng.standard_normal(1) for _ in groups])


def _group(uid: int, new_tokens: int, vocab: int, rng: np.random.Generator) -> Group:
    def tokens(count: int) -> Any:
        return rng.integers(0, vocab, count, dtype=np.int32)

    zeros = np.zeros(new_tokens, np.float32)
    sample = Sample(uid, 0, tokens(new_tokens), zeros, zeros.astype(np.int32), "truncated")
    return Group(Prompt(uid, tokens(PROMPT_TOKENS)), [sample])


def scored(one: Learner, given: Batch) -> Batch:
    """Return `given` with the log-probs of the learner's current weights as those of the engine."""
    return replace(given, rollout_logprobs=one.score(given))
