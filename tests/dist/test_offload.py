"""Offload to host memory on several gloo ranks, some with uneven shards: no bit changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.fsdp2 import activation_offload
from spmd_rl.train.trainer import Trainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import write_model_folder
from tests.dist.trainers import Splits, digests, train

pytestmark = pytest.mark.dist

Report = dict[str, dict[str, str]]
SPLITS = {"2 shards": RoleSplit(), "2 replicas": RoleSplit(dp=2)}
PLAIN = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    max_tokens=150,
    backend=Fsdp2Config(wrap="layer", recompute="all"),
)


def report_of(context: RoleContext, model: Path, saved: Path) -> Report:
    """Train with everything on the device, and with moments, master weights and activations in host
    memory, and tell digests of what each leaves.
    """

    def built(offload: str) -> Trainer:
        backend = replace(PLAIN.backend, offload=offload, offload_activations=offload != "none")
        return Trainer(replace(PLAIN, backend=backend), context, str(model))

    report: Report = {}
    for offload in ("none", "moments", "master"):
        try:
            trainer = built(offload)
        except ConfigError as error:
            report["refused"] = {"sentence": str(error)}
            continue
        train(trainer, range(2))
        if offload == "moments":
            trainer.save(str(saved))
        train(trainer, range(2, 4))
        trainer.wait_until_saved()
        report[offload] = digests(trainer)
    resumed = built("none")
    resumed.load(str(saved))
    train(resumed, range(2, 4))
    return report | {"resumed": digests(resumed)}


def on_rank(world: World, work: Path) -> dict[str, Report]:
    activation_offload.LEAST_BYTES = 1
    splits = Splits(world, SPLITS)
    return splits.each(
        lambda split: report_of(splits.context(split), work, work / f"{split} saved")
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return on_ranks(on_rank, 2, write_model_folder(tmp_path_factory.mktemp("offload")))[0]


@pytest.mark.parametrize("split", SPLITS)
def test_weights_and_moments_have_the_same_bits(reports: dict[str, Report], split: str) -> None:
    report = reports[split]
    assert report["moments"] == report["none"]
    assert report["resumed"] == report["none"]


def test_master_weights_of_one_shard_sleep_on_each_replica(reports: dict[str, Report]) -> None:
    assert reports["2 replicas"]["master"] == reports["2 replicas"]["none"]


def test_master_weights_of_more_shards_may_not_sleep(reports: dict[str, Report]) -> None:
    assert reports["2 shards"]["refused"]["sentence"] == (
        "trainer.backend.offload = 'master' needs one shard, and there are 2: with more, "
        "weights are gathered from the master weights in each step, so they must be awake; "
        "set it to 'moments'"
    )
