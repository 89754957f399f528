"""Run under torchrun by test_roles.py: `roles_ranks.py MODEL DP OUT.json FOLDER`.

Trains a policy and a critic, and scores with a frozen model before and after a push. Then builds
all three anew from checkpoints in FOLDER, and does the last step again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.algo.losses import ValueInput, grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.token_values import TokenValues
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import execute
from spmd_rl.weights.plan.layout_rules import LayoutRules, compressed
from spmd_rl.weights.plan.moves import plan_moves
from tests.dist.checkpoint_ranks import digests
from tests.dist.train_case import make_batch
from tests.dist.train_ranks import context_of

Roles = tuple[Trainer, ValueTrainer, FrozenModel]


def squares(out: ValueInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (out.values - out.columns["returns"]) ** 2, {}


def new_roles(context: RoleContext, model: Path, seed: int) -> Roles:
    cfg = TrainerConfig(init="random", seed=seed, lr=1e-2, eps=1e-4, max_tokens=150)
    return (
        Trainer(cfg, context, str(model)),
        ValueTrainer(cfg, context, str(model)),
        FrozenModel(FrozenConfig.like(cfg), context, str(model)),
    )


def own_shard(context: RoleContext, seed: int, few: bool = False) -> Batch:
    batch = make_batch(seed)
    returns = np.random.default_rng(seed).normal(size=batch.num_tokens).astype(np.float32)
    batch = batch.with_columns(returns=np.where(batch.mask, returns, 0).astype(np.float32))
    batch = batch.select([0, 1]) if few else batch
    return batch.shard(context.data_size)[context.data_rank]


def in_order(context: RoleContext, mine: TokenValues) -> list[str]:
    """The bits of every sequence of the batch, whichever rank had it."""
    ends = np.cumsum(mine.lengths)
    own = {
        int(index): mine.values[end - length : end].tobytes().hex()
        for index, length, end in zip(mine.index, mine.lengths, ends, strict=True)
    }
    found: dict[int, str] = {}
    for blob in context.all_gather_bytes(msgspec.msgpack.encode(own)):
        found |= msgspec.msgpack.decode(blob, type=dict[int, str])
    return [found[index] for index in sorted(found)]


def push(source: Trainer, sink_role: FrozenModel, version: int) -> None:
    """What a link does: each rank's shard goes to the rank that has its box."""
    context = source.context
    sink = sink_role.weight_sink()
    ends = LocalEnds(context.rank, source.weight_source(), sink, torch.device("cpu"))
    layouts = [compressed(end.layout(context.rank)) for end in (ends.the_source(), sink)]
    blobs = context.all_gather_bytes(msgspec.msgpack.encode(layouts))
    pairs = [msgspec.msgpack.decode(blob, type=list[LayoutRules]) for blob in blobs]
    nodes = dict.fromkeys(range(context.size), 0)
    sources, sinks = ([pair[i] for pair in pairs] for i in range(2))
    plan = plan_moves(sources, sinks, nodes, context.rank)
    sink.open()
    execute(plan.moves, ends, context.group)
    sink.commit(version)


def step(roles: Roles, seed: int) -> dict[str, object]:
    """Train policy and critic, and return what all three now compute."""
    policy, critic, frozen = roles
    context = policy.context
    batch = own_shard(context, seed)
    policy.train_step(batch, grpo_loss)
    critic.train_step(batch, squares)
    return {
        "policy": in_order(context, policy.score(batch)),
        "values": in_order(context, critic.values(batch)),
        "frozen": in_order(context, frozen.score(batch)),
        "critic": digests(critic),
    }


def main(model: Path, dp: int, out: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    context = context_of(dp)
    policy, critic, frozen = roles = new_roles(context, model, seed=0)
    batch = own_shard(context, 5)
    report: dict[str, object] = {
        "before": [in_order(context, one.score(batch)) for one in (policy, frozen)]
    }
    step(roles, 0)
    push(policy, frozen, 1)
    report["pushed"] = [in_order(context, one.score(batch)) for one in (policy, frozen)]
    for role, name in zip(roles, ("policy", "critic", "frozen"), strict=True):
        role.save(str(folder / name))
        role.wait_until_saved()
    context.barrier()
    report["whole"] = step(roles, 1)
    again = new_roles(context, model, seed=9)
    for role, name in zip(again, ("policy", "critic", "frozen"), strict=True):
        role.load(str(folder / name))
    report["resumed"] = step(again, 1)
    # Two sequences: with more ranks than sequences, some ranks have nothing but their collectives.
    few = own_shard(context, 9, few=True)
    report["few"] = critic.train_step(few, squares)
    ids = frozen.top_logprobs(few, 3).ids
    report["top"] = in_order(context, ids)
    report["rewards"] = critic.rewards(few).values.shape == few.index.shape
    if context.rank == 0:
        out.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
