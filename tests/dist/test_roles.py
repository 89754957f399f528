"""A policy, its critic and a frozen model on one, two, three and four gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import ValueInput, grpo_loss
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.value_trainer import ValueTrainer
from spmd_rl.types.batch import Batch
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import execute
from spmd_rl.weights.plan.layout_rules import LayoutRules, compressed
from spmd_rl.weights.plan.moves import plan_moves
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import make_batch, write_model_folder
from tests.dist.trainers import Splits, digests, in_order, own_shard

pytestmark = pytest.mark.dist

Report = dict[str, Any]
Roles = tuple[Trainer, ValueTrainer, FrozenModel]
NAMES = ("policy", "critic", "frozen")
SPLITS = {
    "one": RoleSplit(ranks="0-0"),
    "two": RoleSplit(ranks="0-1"),
    "three": RoleSplit(ranks="0-2"),
    "two replicas of two": RoleSplit(dp=2),
}


def squares(out: ValueInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (out.values - out.columns["returns"]) ** 2, {}


def new_roles(context: RoleContext, model: Path, seed: int) -> Roles:
    cfg = TrainerConfig(init="random", seed=seed, lr=1e-2, eps=1e-4, max_tokens=150)
    return (
        Trainer(cfg, context, str(model)),
        ValueTrainer(cfg, context, str(model)),
        FrozenModel(FrozenConfig.like(cfg), context, str(model)),
    )


def with_returns(context: RoleContext, seed: int, few: bool = False) -> Batch:
    batch = make_batch(seed)
    returns = np.random.default_rng(seed).normal(size=batch.num_tokens).astype(np.float32)
    batch = batch.with_columns(returns=np.where(batch.mask, returns, 0).astype(np.float32))
    return own_shard(context, batch.select([0, 1]) if few else batch)


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
    batch = with_returns(context, seed)
    policy.train_step(batch, grpo_loss)
    critic.train_step(batch, squares)
    return {
        "policy": in_order(context, policy.score(batch)),
        "values": in_order(context, critic.values(batch)),
        "frozen": in_order(context, frozen.score(batch)),
        "critic": digests(critic),
    }


def report_of(context: RoleContext, model: Path, folder: Path) -> Report:
    """Train a policy and a critic, and score with a frozen model before and after a push. Then
    build all three anew from checkpoints, and do the last step again.
    """
    policy, critic, frozen = roles = new_roles(context, model, seed=0)
    batch = with_returns(context, 5)
    report: Report = {"before": [in_order(context, one.score(batch)) for one in (policy, frozen)]}
    step(roles, 0)
    push(policy, frozen, 1)
    report["pushed"] = [in_order(context, one.score(batch)) for one in (policy, frozen)]
    for role, name in zip(roles, NAMES, strict=True):
        role.save(str(folder / name))
        role.wait_until_saved()
    context.barrier()
    report["whole"] = step(roles, 1)
    again = new_roles(context, model, seed=9)
    for role, name in zip(again, NAMES, strict=True):
        role.load(str(folder / name))
    report["resumed"] = step(again, 1)
    # Two sequences: with more ranks than sequences, some ranks have nothing but their collectives.
    few = with_returns(context, 9, few=True)
    report["few"] = critic.train_step(few, squares)
    report["top"] = in_order(context, frozen.top_logprobs(few, 3).ids)
    report["rewards"] = critic.rewards(few).values.shape == few.index.shape
    return report


def on_rank(world: World, work: Path) -> dict[str, Report]:
    splits = Splits(world, SPLITS)
    return splits.each(lambda split: report_of(splits.context(split), work, work / split))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return on_ranks(on_rank, 4, write_model_folder(tmp_path_factory.mktemp("roles")))[0]


@pytest.mark.parametrize("split", SPLITS)
def test_a_push_and_a_checkpoint_bring_the_bits(split: str, reports: dict[str, Report]) -> None:
    report = reports[split]
    policy, frozen = report["before"]
    assert policy == frozen
    new_policy, pushed = report["pushed"]
    assert new_policy == pushed != policy
    assert report["whole"] == report["resumed"], "a resumed run has the same bits"
    assert report["whole"]["policy"] != report["whole"]["frozen"], "a step moves the policy alone"
    assert report["rewards"]


@pytest.mark.parametrize("split", [*SPLITS][1:])
def test_several_ranks_compute_what_one_does(split: str, reports: dict[str, Report]) -> None:
    report, one_rank = reports[split], reports["one"]
    assert report["before"] == one_rank["before"], "forward passes do not depend on ranks"
    assert report["few"]["train/loss"] == pytest.approx(one_rank["few"]["train/loss"], rel=1e-3)
    assert len(report["top"]) == 2
