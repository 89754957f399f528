"""Experts over 2 and 4 GPUs: equal bits of layers, of an engine's gathers, and of a trainer."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.kernels.moe.deep_ep_buffer import PACKAGE
from spmd_rl.kernels.runtime.versions import installed
from tests.dist.launched import Launched, run_script
from tests.dist.torchrun import ROOT, torchrun
from tests.dist.train_case import write_model_folder
from tests.gpu.train.conftest import SIZES
from tests.gpu.train.test_experts import EXPERTS
from tests.shared_gpus import sharing

pytest.importorskip("triton")

from tests.gpu.train.expert_ranks import CASES, GATHERS

NUM_RANKS = (2, 4)
KINDS = ["torch", "deep_ep"]
LOSSES = [f"{kind} {place}" for kind in KINDS for place in ("dispatch", "combine")]
LOSSES += ["symm gather"]
LOST_S = 90.0  # start-up included
Report = Any


@pytest.fixture(scope="module", params=NUM_RANKS, ids=lambda size: f"{size} ranks")
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("experts"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES | EXPERTS))
    return folder


def run(what: str, num_ranks: int, folder: Path) -> Report:
    out = folder / f"{what}-{num_ranks}.json"
    words = what, str(folder), str(out)
    return torchrun("train/expert_ranks.py", num_ranks, out, *words, room="gpu", timeout_s=280)


@pytest.fixture(scope="module")
def layers(num_ranks: int, folder: Path) -> Report:
    return run("layers", num_ranks, folder)


@pytest.fixture(scope="module")
def gathers(num_ranks: int, folder: Path) -> Report:
    return run("gathers", num_ranks, folder)


@pytest.fixture(scope="module")
def trained(num_ranks: int, folder: Path) -> Report:
    return run("steps", num_ranks, folder)


def needs(kind: str) -> None:
    if kind == "deep_ep" and not installed(PACKAGE):
        pytest.skip(f"needs {PACKAGE}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "30B-A3B"])
def test_a_layer_has_the_bits_of_one_rank(
    case: str, kind: str, num_ranks: int, layers: Report
) -> None:
    """Outputs, and the gradients of rows, of the router and of all experts."""
    needs(kind)
    for of_rank in layers:
        alone = of_rank[f"{case}, alone"]
        for ep in (2, 4)[: num_ranks // 2]:
            found = of_rank[f"{case}, ep {ep}, {kind}"]
            assert len(found) > 4
            assert {name for name in found if found[name] != alone[name]} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_layer_has_the_bits_of_one_rank(kind: str, num_ranks: int, layers: Report) -> None:
    """Gradients of experts have other rows there; they are those of the reference."""
    needs(kind)
    for of_rank in layers:
        alone = of_rank["30B-A3B, alone"]
        for ep in (2, 4)[: num_ranks // 2]:
            found, reference = (of_rank[f"30B-A3B, ep {ep}, {one}"] for one in (kind, "torch"))
            assert found == reference
            for name in ("out", "out without gradients", "x", "gate.weight"):
                assert found[name] == alone[name], (ep, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_rows_takes_part(kind: str, num_ranks: int, layers: Report) -> None:
    needs(kind)
    for of_rank in layers:
        for ep in (2, 4)[: num_ranks // 2]:
            assert of_rank[f"no rows, ep {ep}, {kind}"] == of_rank["no rows, alone"]


def test_sums_that_each_rank_rounds_have_other_bits(layers: Report) -> None:
    for of_rank in layers:
        assert of_rank["control"] > 0.01


@pytest.mark.parametrize("kind", ["torch", "symm"])
@pytest.mark.parametrize("case", GATHERS)
def test_gathered_rows_have_the_bits_of_one_rank(
    case: str, kind: str, num_ranks: int, gathers: Report
) -> None:
    for of_rank in gathers:
        for ep in (2, 4)[: num_ranks // 2]:
            assert of_rank[f"{case}, ep {ep}, {kind}"] == of_rank[f"{case}, alone"]


def test_a_recorded_graph_has_the_same_bits(num_ranks: int, gathers: Report) -> None:
    for of_rank in gathers:
        for ep in (2, 4)[: num_ranks // 2]:
            assert of_rank[f"ep {ep}, replays"]
            assert [name for name in of_rank if name.endswith(f"ep {ep}, graph")] == []


@pytest.mark.parametrize("recompute", ["", ", recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_do_not_depend_on_how_many_gpus_share_experts(
    kind: str, recompute: str, num_ranks: int, trained: Report
) -> None:
    """Log-probs, losses, norms that are clipped, weights and moments, over 20 steps.

    A head whose logits are computed again has other gradients, so like is compared with like.
    """
    needs(kind)
    alone = trained[f"ep 1{recompute}"]
    assert alone["first"] != alone["last"]
    for ep in (2, 4)[: num_ranks // 2]:
        name = f"ep {ep}" + ", deep_ep" * (kind == "deep_ep") + recompute
        assert trained[name]["first"] == alone["first"], name
        for what in ("metrics", "last", "state") if trained["deterministic"] else ():
            assert trained[name][what] == alone[what], (name, what)
    if not trained["deterministic"]:
        pytest.skip("only the first log-probs were compared: it needs FlashAttention-4")


@pytest.mark.parametrize("size", NUM_RANKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_rank_ends_those_that_wait_for_its_rows(
    loss: str, size: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Long before DeepEP's own limit of 100 seconds."""
    needs(loss.split()[0])
    struck = tmp_path / "struck"
    script = Path(__file__).with_name("expert_ranks.py")
    words = [str(size), str(script), f"lose {loss}", str(tmp_path), str(struck)]
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"PYTHONPATH": search} | sharing(size)
    process = Launched(words, ROOT, variables, run_script)
    try:
        said = "".join(process.communicate(LOST_S))
    finally:
        process.end()
    assert struck.exists(), said
    assert process.returncode != 0
    record_property("seconds", time.time() - struck.stat().st_mtime)


def test_control_steps_with_rounded_sums_differ(trained: Report) -> None:
    assert trained["control"]["first"] != trained["ep 1"]["first"]
    assert trained["control"]["state"] != trained["ep 1"]["state"]
