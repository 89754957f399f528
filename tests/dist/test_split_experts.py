"""Experts over 1, 2 and 4 gloo ranks of FSDP2: the same bits of log-probs, steps and weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from spmd_rl.mesh.split import plan_split
from spmd_rl.model.read import read_spec
from spmd_rl.train.cost.memory import step_sizes
from tests.dist.experts_ranks import CONFIG, SPLITS, STEPS
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_mixture_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture_folder(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    return torchrun("experts_ranks.py", 4, work / "4.json", str(work), str(work / "4.json"))


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
