"""The base of a trainer's adapters beside a frozen reference, on gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import FrozenConfig, Fsdp2Config, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.trainer import Trainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import make_batch, write_model_folder
from tests.dist.trainers import Splits, in_order, own_shard, train

pytestmark = pytest.mark.dist

SPLITS = {"one": RoleSplit(ranks="0-0"), "two": RoleSplit(), "two copies": RoleSplit(dp=2)}
CASES = [("one", "model"), ("two", "model"), ("two", "layer"), ("two copies", "layer")]
DTYPES = ("float32", "bfloat16")
Scores = dict[str, list[str]]


def scores_of(context: RoleContext, model: str, dtype: str, wrap: str) -> Scores:
    """Train adapters, and score with them, with the base alone, and with a frozen model."""
    backend, lora = Fsdp2Config(wrap=wrap), LoraConfig(rank=4)
    cfg = TrainerConfig(
        init="random", lr=1e-2, max_tokens=150, dtype=dtype, lora=lora, backend=backend
    )
    policy = Trainer(cfg, context, model)
    reference = FrozenModel(FrozenConfig.like(cfg), context, model)
    batch = own_shard(context, make_batch(5))
    train(policy, range(2))
    scores = [policy.score, policy.score_base, policy.score, reference.score]
    names = ["before", "base", "after", "reference"]
    return {
        name: in_order(context, score(batch)) for name, score in zip(names, scores, strict=True)
    }


def on_rank(world: World, model: str) -> dict[str, dict[str, Scores]]:
    splits, found = Splits(world, SPLITS), {}
    for split, wrap in CASES:
        if splits.has_part(split):
            context = splits.context(split)
            found[f"{split}, {wrap}"] = {
                dtype: scores_of(context, model, dtype, wrap) for dtype in DTYPES
            }
    return found


def test_the_base_alone_has_the_bits_of_a_frozen_reference(tmp_path: Path) -> None:
    reports = on_ranks(on_rank, 2, str(write_model_folder(tmp_path)))[0]
    assert len(reports) == len(CASES)
    for report in reports.values():
        for scores in report.values():
            assert scores["base"] == scores["reference"]
            assert scores["before"] == scores["after"] != scores["base"], "adapters are on"
        assert report["float32"]["base"] != report["bfloat16"]["base"]
