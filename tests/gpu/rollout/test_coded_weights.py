"""An engine with weights in few bits on a GPU: the samples of bf16 weights with their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_tensors import as_codes, as_rounded, hold_codes
from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.fused_projections import FusableLayer, FusedProjections
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.types.samples import Sample
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.samples import finish

NAMES: tuple[WeightFormat, ...] = ("e4m3", "int4")
CODED = {name: replace(USUAL, weights=name) for name in NAMES}


def model_of(cfg: NativeEngineConfig, name: WeightFormat) -> CausalLM:
    """Return a model with codes of a format, or with what they stand for."""
    model = CausalLM(SPEC).to(torch.bfloat16)
    hold_codes(model, SPEC, cfg.weights)
    model = model.to(DEVICE).requires_grad_(False)
    convert = as_rounded if cfg.weights == "full" else as_codes
    fill(model, convert(random_weights(SPEC, 0), SPEC, name))
    return model


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> WeightFormat:
    found: WeightFormat = request.param
    return found


@pytest.fixture(scope="module")
def expected(name: WeightFormat) -> dict[tuple[int, int], Sample]:
    return finish(new_engine(model_of(USUAL, name), USUAL), workload())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_batch", [24, 64, 5])
def test_codes_draw_the_samples_of_their_numbers(
    name: WeightFormat, expected, graphs: bool, max_batch: int
) -> None:
    cfg = replace(CODED[name], cuda_graphs=graphs, max_batch=max_batch)
    engine = new_engine(model_of(cfg, name), cfg)
    assert unequal(finish(engine, workload()), expected) == 0
    assert (engine.stats()["num_graphs"] > 0) == graphs


def test_projections_of_codes_are_fused(name: WeightFormat) -> None:
    engine = new_engine(model_of(CODED[name], name), CODED[name])
    joined = [one.joined for one in engine.model.modules() if isinstance(one, FusableLayer)]
    assert joined and all(isinstance(one, FusedProjections) for one in joined)


def test_control_one_code_changes_samples(name: WeightFormat, expected) -> None:
    model = model_of(CODED[name], name)
    with torch.no_grad():
        for weight in coded_shapes(SPEC, name):
            model.get_parameter(weight).view(torch.uint8)[3, 5] ^= 0x44
    assert unequal(finish(new_engine(model, CODED[name]), workload()), expected) > 0
