"""Attention to latents, and mixtures beside it: faults in them are found where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass
from spmd_rl.microscope.taps import points
from spmd_rl.microscope.taps.points import Point
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.unit.model.test_latents import BASE, CONFIGS

MIDDLE = 1  # a mixture
CONFIG = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40)
FOUND = {
    "split-k": Point(MIDDLE, "o_proj"),
    "auto-splits": Point(0, "attention"),
}
NewModel = Callable[[], CausalLM]


@pytest.fixture(scope="module", autouse=True)
def _own_points() -> Iterator[None]:
    known = dict(points.OPS)
    yield
    points.set_ops(known)  # other tests ask for those of their own models


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> NewModel:
    folder = tmp_path_factory.mktemp("model")
    config = BASE | CONFIGS["as Moonlight"] | {"vocab_size": 101}
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)

    def build() -> CausalLM:
        model = CausalLM(spec).requires_grad_(False)
        fill(model, random_weights(spec, 1))
        return model

    return build


def trainer(model: CausalLM) -> TrainerPass:
    return TrainerPass(model, max_tokens=256, logit_rows=16)


def test_engine_and_trainer_agree_in_every_op(new_model: NewModel, case: ReplayCase) -> None:
    comparison = compare(EnginePass(new_model(), CONFIG), trainer(new_model()), case)
    assert comparison.results == ()
    assert {one.op for one in comparison.points} >= {"q", "k", "v", "attention", "o_proj"}


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found(fault: str, new_model: NewModel, case: ReplayCase) -> None:
    engine = EnginePass(new_model(), CONFIG)
    plant(fault, engine)
    comparison = compare(engine, trainer(new_model()), case)
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == FOUND[fault]


@pytest.mark.parametrize("fault", ["split-k-qkv", "split-k-gate-up"])
def test_faults_of_joint_products_are_refused(fault: str, new_model: NewModel) -> None:
    with pytest.raises(ConfigError, match="here they are apart"):
        plant(fault, EnginePass(new_model(), CONFIG))


def test_the_librarys_product_can_be_planted(new_model: NewModel, case: ReplayCase) -> None:
    engine = EnginePass(new_model(), CONFIG)
    plant("library-linear", engine)
    ops = {one.point.op for one in compare(engine, trainer(new_model()), case).results}
    assert not ops & {"q", "k", "v"}
