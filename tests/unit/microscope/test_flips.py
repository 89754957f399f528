"""Router flips: which layer, token and experts, and whether numbers differed before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.errors import ConfigError
from spmd_rl.microscope.diagnose.compare import Comparison, compare
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.page.verdict import verdict
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass, load_model
from spmd_rl.microscope.taps import points
from spmd_rl.microscope.taps.points import Point
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.layers.moe import ROUTES
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.unit.model.test_glm4_moe import BASE
from tests.unit.train.test_expert_loads import QWEN

CONFIG = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40, num_pages=200)
CPU = torch.device("cpu")
NAMES = ("engine", "trainer")


@pytest.fixture(autouse=True)
def _ops() -> Iterator[None]:
    known = dict(points.OPS)
    yield
    points.set_ops(known)


@pytest.fixture(params=["qwen3_moe", "glm4_moe"])
def passes(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[str], tuple[EnginePass, TrainerPass]]:
    config = QWEN if request.param == "qwen3_moe" else BASE | {"initializer_range": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"initializer_range": 0.2}))
    save_folder(tmp_path / "m", tmp_path, random_weights(read_spec(tmp_path), 1))

    def made(fault: str) -> tuple[EnginePass, TrainerPass]:
        engine = EnginePass(load_model(tmp_path / "m", torch.float32, CPU), CONFIG)
        if fault:
            plant(fault, engine)
        return engine, TrainerPass(load_model(tmp_path / "m", torch.float32, CPU), max_tokens=64)

    return made


@pytest.fixture
def case() -> ReplayCase:
    rng = np.random.default_rng(0)
    return ReplayCase(
        tuple(
            ReplaySequence(f"{number}:0", rng.integers(2, 50, 9), rng.integers(2, 50, length))
            for number, length in enumerate((4, 30))
        )
    )


def said(comparison: Comparison, case: ReplayCase) -> str:
    return verdict(comparison, case, NAMES)


def test_nothing_flips_without_a_fault(passes: Callable[..., tuple], case: ReplayCase) -> None:
    comparison = compare(*passes(""), case)
    assert comparison.agree
    assert comparison.flip is None
    assert {"router", ROUTES, "experts"} <= {point.op for point in comparison.points}


def test_a_planted_flip_is_named(passes: Callable[..., tuple], case: ReplayCase) -> None:
    engine, trainer = passes("route-flip")
    comparison = compare(engine, trainer, case)
    flip = comparison.flip
    assert flip is not None
    assert flip.point == Point(1, ROUTES)
    assert flip.parted_at is None
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == flip.point
    assert "experts" not in {
        one.point.op for one in comparison.results if one.status == "introduced"
    }, "what its experts give a token follows from the flip"
    result = next(one for one in comparison.results if one.point == flip.point)
    assert flip.row == result.differing_rows[0]
    gone = set(flip.right) - set(flip.left)
    assert len(gone) == 1 and len(flip.left) == len(flip.right)
    text = said(comparison, case)
    name, position = case.locate(flip.row)
    assert f"Router flip: layer 1 sends the token at {name} position {position} to expert" in text
    assert f"expert {next(iter(gone))} in the trainer, the first of" in text
    assert "The flip came first: nothing differs before it." in text


def test_a_numeric_difference_before_a_flip_is_named(
    passes: Callable[..., tuple], case: ReplayCase
) -> None:
    """Router logits that differ make tokens flip: the router's own weights have changed."""
    engine, trainer = passes("")
    gate = engine.model.model.layers[1].mlp.gate
    with torch.no_grad():
        gate.weight.mul_(-1.0)
    comparison = compare(engine, trainer, case)
    assert comparison.flip is not None
    assert comparison.flip.parted_at == Point(1, "router")
    assert "Numbers came first: the passes part at layer 1 router." in said(comparison, case)


def test_a_dense_model_has_no_router_to_plant_it_in(tmp_path: Path) -> None:
    dense = {key: value for key, value in QWEN.items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps(dense | {"model_type": "qwen3"}))
    save_folder(tmp_path / "m", tmp_path, random_weights(read_spec(tmp_path), 1))
    engine = EnginePass(load_model(tmp_path / "m", torch.float32, CPU), CONFIG)
    with pytest.raises(ConfigError, match="needs a mixture"):
        plant("route-flip", engine)
