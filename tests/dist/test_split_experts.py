"""Experts over 1, 2 and 4 gloo ranks of FSDP2: the same bits of log-probs, steps and weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.mesh.world import World
from spmd_rl.model.read import read_spec
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.cost.memory import step_sizes
from spmd_rl.train.trainer import Trainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import write_glm_folder, write_mixture_folder
from tests.dist.trainers import Splits, digests, logprobs, train

pytestmark = pytest.mark.dist

Report = dict[str, Any]
STEPS = 6
SPLITS = {
    "ep 1": RoleSplit(),
    "ep 2": RoleSplit(ep=2),
    "ep 4": RoleSplit(ep=4),
    "2 copies, ep 1": RoleSplit(dp=2),
    "2 copies, ep 2": RoleSplit(dp=2, ep=2),
    "4 copies, ep 4": RoleSplit(dp=4, ep=4),
}
CONFIG = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    max_tokens=120,
    clip_norm=0.05,
    deterministic=True,
    backend=Fsdp2Config(wrap="layer"),
)
METRICS = ("train/loss", "train/grad_norm", "train/entropy", "experts/max_load")


def steps(trainer: Trainer, first: int, count: int) -> list[dict[str, str]]:
    """Take some steps, and return metrics as bits."""
    found = train(trainer, range(first, first + count))
    return [{name: metrics[name].hex() for name in METRICS} for metrics in found]


def of_run(trainer: Trainer, count: int = STEPS) -> dict[str, Any]:
    first = logprobs(trainer)
    metrics = steps(trainer, 0, count)
    return {
        "first": first,
        "metrics": metrics,
        "last": logprobs(trainer),
        "state": digests(trainer),
    }


def held(trainer: Trainer) -> list[tuple[list[str], int]]:
    """The weights of which each rank has some rows, and the bytes of all its rows."""
    weights = trainer.backend.state()["weights"]
    own = sorted(name for name, one in weights if one.local.numel())
    num_bytes = sum(one.local.nbytes for _, one in weights)
    blobs = trainer.context.all_gather_bytes(msgspec.msgpack.encode((own, num_bytes)))
    return [msgspec.msgpack.decode(blob, type=tuple[list[str], int]) for blob in blobs]


def gathered(trainer: Trainer) -> dict[str, str]:
    """Whole weights as bits, as this rank sees them."""
    return {
        name: np.asarray(trainer.backend.gather(name).detach()).tobytes().hex()
        for name in trainer.backend.names()
    }


def on_rank(world: World, work: Path, glm: Path) -> Report:
    """A trainer takes the same steps where 1, 2 and 4 ranks share its experts. Some of them go on
    from a checkpoint of another number, or from an exported folder.
    """
    splits = Splits(world, SPLITS)

    def built(split: str, model: Path = work, **settings: Any) -> Trainer:
        return Trainer(replace(CONFIG, **settings), splits.context(split), str(model))

    report: Report = {name: {} for name in ("runs", "held", "resumed", "exported", "copies", "glm")}
    for split in ("ep 1", "ep 2", "ep 4"):
        trainer = built(split)
        report["held"][split] = held(trainer)
        report["runs"][split] = of_run(trainer)
    saved = built("ep 2")
    steps(saved, 0, 3)
    saved.save(str(work / "saved"))
    saved.wait_until_saved()
    saved.export_hf(str(work / "hf"))
    whole = gathered(saved)
    report["after"] = steps(saved, 3, 2), digests(saved)
    for split in ("ep 1", "ep 4"):
        resumed = built(split, seed=7)
        resumed.load(str(work / "saved"))
        report["resumed"][split] = steps(resumed, 3, 2), digests(resumed)
        loaded = built(split, work / "hf", init="folder")
        report["exported"][split] = gathered(loaded) == whole
    for recompute in ("cheap", "all"):
        backend = Fsdp2Config(wrap="layer", recompute=recompute)
        report[recompute] = of_run(built("ep 2", backend=backend), 3)
    for split, recompute in product(("ep 1", "ep 2"), ("none", "all")):
        backend = Fsdp2Config(wrap="layer", recompute=recompute)
        report["glm"][f"{split}, {recompute}"] = of_run(built(split, glm, backend=backend), 2)
    for split in ("2 copies, ep 1", "2 copies, ep 2", "4 copies, ep 4"):
        found = train(built(split, deterministic=False), range(3))
        report["copies"][split] = [{name: one[name] for name in METRICS} for one in found]
    return report


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture_folder(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    return on_ranks(on_rank, 4, work, write_glm_folder(work / "glm"))[0]


@pytest.mark.parametrize("what", ["first", "metrics", "last", "state"])
@pytest.mark.parametrize("split", ["ep 2", "ep 4"])
def test_steps_do_not_depend_on_how_many_ranks_share_experts(
    split: str, what: str, report: Report
) -> None:
    """Log-probs, losses, norms that are clipped, weights and moments, over all steps."""
    alone, shared = (report["runs"][one] for one in ("ep 1", split))
    assert shared[what] == alone[what]
    assert len(alone["metrics"]) == STEPS
    assert alone["first"] != alone["last"]


@pytest.mark.parametrize(("split", "num_own"), [("ep 1", 8), ("ep 2", 4), ("ep 4", 2)])
def test_a_rank_holds_its_own_experts_alone(split: str, num_own: int, report: Report) -> None:
    holders: Counter[str] = Counter()
    for names, _ in report["held"][split]:
        experts = {name for name in names if ".experts." in name}
        numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in experts}
        assert sorted(numbers) == list(range(min(numbers), min(numbers) + num_own))
        assert len(experts) == 3 * 3 * num_own
        holders.update(experts)
    assert len(holders) == 3 * 3 * 8
    assert set(holders.values()) == {4 * num_own // 8}


@pytest.mark.parametrize("split", ["ep 1", "ep 2", "ep 4"])
def test_the_plan_knows_what_a_rank_holds(split: str, work: Path, report: Report) -> None:
    placement = plan_split({"train": SPLITS[split]}, 4).train
    planned = step_sizes(read_spec(work), CONFIG, placement)
    largest = max(num_bytes for _, num_bytes in report["held"][split])
    # the plan cuts the sum, and ranks cut each tensor
    assert planned.master <= largest <= 1.05 * planned.master
    assert planned.moments == 2 * planned.master


@pytest.mark.parametrize("split", ["ep 1", "ep 4"])
def test_a_checkpoint_goes_on_where_other_ranks_share_experts(split: str, report: Report) -> None:
    assert report["resumed"][split] == report["after"]


@pytest.mark.parametrize("split", ["ep 1", "ep 4"])
def test_an_exported_folder_is_read_where_other_ranks_share_experts(
    split: str, work: Path, report: Report
) -> None:
    assert report["exported"][split]
    written = load_file(work / "hf" / "model.safetensors")
    shapes = read_spec(work).parameter_shapes()
    assert {name: tuple(one.shape) for name, one in written.items()} == shapes


@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_recomputed_layers_send_their_rows_again(recompute: str, report: Report) -> None:
    expected = report["runs"]["ep 1"]
    assert report[recompute]["first"] == expected["first"]
    assert report[recompute]["metrics"] == expected["metrics"][:3]


def test_another_family_has_the_same_bits_whatever_is_recomputed(report: Report) -> None:
    """With a router of sigmoids and shared experts."""
    runs = report["glm"]
    assert len(runs) == 4
    assert all(run == runs["ep 1, none"] for run in runs.values())


@pytest.mark.parametrize("split", ["2 copies, ep 2", "4 copies, ep 4"])
def test_copies_of_the_model_share_experts_too(split: str, report: Report) -> None:
    found, expected = (report["copies"][one] for one in (split, "2 copies, ep 1"))
    for step, other in zip(found, expected, strict=True):
        assert step == pytest.approx(other, rel=2e-5, abs=1e-7)
