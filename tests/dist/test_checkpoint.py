"""A checkpoint of two gloo ranks, loaded on one, two, three and four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import write_model_folder
from tests.dist.trainers import Splits, digests, logprobs, train

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SPLITS = {
    "whole": RoleSplit(ranks="0-1"),
    "one": RoleSplit(ranks="0-0"),
    "two": RoleSplit(ranks="0-1"),
    "three": RoleSplit(ranks="0-2"),
    "two replicas of two": RoleSplit(dp=2),
}


def on_rank(world: World, model: Path, folder: Path) -> dict[str, Report]:
    """Train two steps and save, or load what was saved; then train a step more."""
    splits = Splits(world, SPLITS)

    def report_of(split: str) -> Report:
        saves = split == "whole"
        cfg = TrainerConfig(init="random", seed=0 if saves else 7, lr=1e-2, eps=1e-4)
        trainer = Trainer(cfg, splits.context(split), str(model))
        if saves:
            train(trainer, range(2))
            trainer.save(str(folder))
            trainer.wait_until_saved()
        else:
            trainer.load(str(folder))
        report: Report = {"digests": digests(trainer), "logprobs": logprobs(trainer)}
        train(trainer, [2])
        differences = trainer.resume_differences()
        return report | {"after": digests(trainer), "resume_differences": differences}

    return splits.each(report_of)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def reports(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    model = write_model_folder(tmp_path_factory.mktemp("checkpoint"))
    return on_ranks(on_rank, 4, model, folder)[0]


def test_the_same_ranks_go_on_with_the_same_bits(folder: Path, reports: dict[str, Report]) -> None:
    resumed = reports["two"]
    assert resumed == reports["whole"]
    assert resumed["after"] != resumed["digests"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *(
            f"{kind}-{rank:05d}-000.safetensors"
            for kind in ("exp_avg", "exp_avg_sq")
            for rank in range(2)
        ),
        "index.json",
        *(f"weights-{rank:05d}-000.safetensors" for rank in range(2)),
    ]


@pytest.mark.parametrize("split", ["one", "three", "two replicas of two"])
def test_other_ranks_load_the_same_bits(split: str, reports: dict[str, Report]) -> None:
    """Weights, moments and the first log-probs; the next gradients are summed in another order."""
    resumed, whole = reports[split], reports["whole"]
    assert resumed["digests"] == whole["digests"]
    assert resumed["logprobs"] == whole["logprobs"]
    assert resumed["resume_differences"] == []
