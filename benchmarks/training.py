"""Shared parts of the training benchmarks: a learner with a Qwen3 shape on one GPU, and a batch."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.shapes import random_weights, write_config
from spmd_rl.algo.packing import pack
from spmd_rl.mesh.role_context import Meshes
from spmd_rl.mesh.split import RoleSplit, Split, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.fsdp2.backend import Fsdp2
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
        dtype="bfloat16",
        max_tokens=PACK_TOKENS,
        backend=Fsdp2Config(recompute="cheap" if name == "4B" else "none"),
    )


def learner(
    name: str, cfg: TrainerConfig, world: World = ALONE, axes: RoleSplit = ALL_RANKS
) -> Learner:
    """Return a learner of this shape with random weights, over all ranks of the world.

    It is frozen for Python's garbage collector, as the roles of a rank are.
    """
    gc.unfreeze()
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        spec = write_config(name, Path(folder))
    if not dist.is_initialized():
        join(world, open_store(world) if world.size > 1 else dist.HashStore())
    placement = plan_split(Split(train=axes), world.size)["train"]
    meshes = Meshes(world)
    meshes.build([placement])
    context = meshes.context(placement)
    backend: Fsdp2 | Megatron = (
        Megatron(spec, context, cfg)
        if isinstance(cfg.backend, MegatronConfig)
        else Fsdp2(spec, context.mesh, cfg, context.device)
    )
    backend.fill(random_weights(spec))
    made = Learner(backend, context, cfg)
    gc.collect()
    gc.freeze()
    return made


def batch(num_tokens: int, vocab: int) -> Batch:
    """Return sequences of 128 prompt and 896 response tokens, with random advantages."""
    rng = np.random.default_rng(0)
    count = num_tokens // (PROMPT_TOKENS + NEW_TOKENS)
    groups = [_group(uid, NEW_TOKENS, vocab, rng) for uid in range(count)]
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
