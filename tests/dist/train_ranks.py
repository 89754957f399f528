"""Run under torchrun by test_train.py: `train_ranks.py WORK_FOLDER DP OUT.json [RESUME_FOLDER]`.

Trains a few steps on batches split over the ranks and writes what must not depend on the number of
ranks.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.algo.losses import LossInput, Needs, grpo_loss
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.mesh.role_context import Meshes, RoleContext
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World, join, open_store
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.train_case import VOCAB, make_batch

STEPS = 3


def weights(trainer: Trainer) -> dict[str, list[float]]:
    return {
        name: trainer.backend.gather(name).flatten().tolist() for name in trainer.backend.names()
    }


def train(trainer: Trainer, first: int = 0) -> list[dict[str, float]]:
    context = trainer.context
    return [
        trainer.train_step(make_batch(seed).shard(context.data_size)[context.data_rank], grpo_loss)
        for seed in range(first, first + STEPS)
    ]


def all_scores_loss(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that learns from log-probs, entropy and candidates."""
    assert out.candidate_logprobs is not None
    return -out.advantages * out.logprobs - out.entropy - out.candidate_logprobs.mean(1), {}


def train_on_all_scores(trainer: Trainer) -> list[dict[str, float]]:
    """Return the metrics of a step on a whole batch, and of one on two sequences."""
    whole, context = make_batch(), trainer.context
    shape = whole.num_tokens, 3
    ids = np.random.default_rng(0).integers(0, VOCAB, shape, dtype=np.int32)
    whole = whole.with_columns(candidates=np.where(whole.mask[:, None], ids, np.int32(0)))
    needs = Needs(entropy=True, candidates=True)

    def step(batch: Batch) -> dict[str, float]:
        shard = batch.shard(context.data_size)[context.data_rank]
        return trainer.train_step(shard, all_scores_loss, needs=needs)

    return [step(whole), step(whole.select([0, 1]))]


def scores_after_a_broken_pass(trainer: Trainer, fresh: Trainer) -> list[list[float]]:
    """Have a layer of the trainer fail, and then return its scores with the fresh one's weights,
    and the fresh one's scores.
    """
    context = trainer.context
    batch = make_batch().shard(context.data_size)[context.data_rank]
    layer = trainer.backend.scorer.model.model.layers[1]

    def broken(*args: object, **named: object) -> None:
        raise ContractError("a layer fails")

    forward, layer.forward = layer.forward, broken
    with suppress(ContractError):
        trainer.learner.score(batch)
    layer.forward = forward
    trainer.backend.fill((name, fresh.backend.gather(name)) for name in fresh.backend.names())
    return [one.learner.score(batch).tolist() for one in (trainer, fresh)]


class Collectives(TorchDispatchMode):
    """Counts the operators of torch.distributed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            self.counts[op._opname] += 1
        return op(*args, **(kwargs or {}))


def num_collectives(trainer: Trainer) -> tuple[int, list[int]]:
    """Return the micro-batches of a step, and how often it gathers and reduces."""
    context, micros = trainer.context, 0
    batch = make_batch().shard(context.data_size)[context.data_rank]

    def counting(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal micros
        micros += 1
        return grpo_loss(out)

    with Collectives() as found:
        trainer.train_step(batch, counting)
    return micros, [found.counts[name] for name in ("_allgather_base_", "_reduce_scatter_base_")]


def poisoned(trainer: Trainer) -> str:
    """Return the error when the last rank's batch holds a NaN; weights must not change."""
    context = trainer.context
    batch = make_batch().shard(context.data_size)[context.data_rank]
    if context.rank == context.size - 1:
        batch = replace(batch, advantages=np.where(batch.mask, np.nan, 0).astype(np.float32))
    before = weights(trainer)
    try:
        trainer.train_step(batch, grpo_loss)
    except SpmdError as error:
        return str(error) if weights(trainer) == before else "the weights moved"
    return "nothing was raised"


def norms_around_a_failure(trainer: Trainer) -> list[float]:
    """Return the gradient norms of one batch before and after a step whose second micro-batch
    fails. At a rate of 0 the weights stay.
    """
    context, calls = trainer.context, count()
    batch = make_batch().shard(context.data_size)[context.data_rank]

    def broken(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        if next(calls):
            raise ContractError("a later micro-batch fails")
        return grpo_loss(out)

    before = trainer.train_step(batch, grpo_loss, lr=0.0)["train/grad_norm"]
    try:
        trainer.train_step(batch, broken)
    except ContractError:
        return [before, trainer.train_step(batch, grpo_loss, lr=0.0)["train/grad_norm"]]
    return [before]


def context_of(dp: int) -> RoleContext:
    world = World.from_env()
    join(world, open_store(world))
    meshes = Meshes(world)
    placement = plan_split({"train": RoleSplit(dp=dp)}, world.size).train
    meshes.build([placement])
    return meshes.context(placement)


def main(work: Path, dp: int, out: Path, resume: str | None) -> None:
    context = context_of(dp)
    cfg = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=150)
    trainer = Trainer(cfg, context, str(work))
    report: dict[str, object] = {"steps": train(trainer), "weights": weights(trainer)}
    trainer.save(str(out.with_suffix(".ckpt")))
    # Two sequences: with more ranks than sequences, some ranks have nothing but their collectives.
    few = make_batch(9).select([0, 1]).shard(context.data_size)[context.data_rank]
    report["few"] = trainer.train_step(few, grpo_loss)
    report["layers"] = train(
        Trainer(
            replace(cfg, backend=Fsdp2Config(recompute="all", wrap="layer"), max_tokens=60),
            context,
            str(work),
        )
    )
    report["all_scores"] = train_on_all_scores(Trainer(cfg, context, str(work)))
    if dp == 1:
        report["deterministic"] = train(
            Trainer(replace(cfg, deterministic=True), context, str(work))
        )
    trainer.export_hf(str(out.with_suffix(".hf")))
    report["exported"] = weights(trainer)
    if resume:
        resumed = Trainer(replace(cfg, seed=5), context, str(work))
        report["resumed_version"] = resumed.load(resume)
        report["resumed"] = train(resumed, first=STEPS)
    small = replace(cfg, max_tokens=60)
    trainers = [Trainer(replace(small, seed=seed), context, str(work)) for seed in (0, 1, 2)]
    report["after_broken_pass"] = [scores_after_a_broken_pass(*trainers[:2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)  # torch 2.11 has none
        report["after_broken_pass"].append(scores_after_a_broken_pass(*trainers[1:]))
    report["collectives"] = num_collectives(Trainer(small, context, str(work)))
    report["around_failure"] = norms_around_a_failure(Trainer(small, context, str(work)))
    poison = [poisoned(trainer)]
    sentences: list[list[str]] = [[] for _ in range(context.size)]
    dist.all_gather_object(sentences, poison)
    report["poisoned"] = [one for part in sentences for one in part]
    if context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *(sys.argv[4:] or [None]))
