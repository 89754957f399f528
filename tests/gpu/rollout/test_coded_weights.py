"""An engine with weights in 8 bits on a GPU: the samples of bfloat16 weights with their numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmd_rl.model.fused_projections import FusableLayer, FusedProjections
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.low_precision.coded_tensors import as_codes, as_rounded, hold_codes
from spmd_rl.model.low_precision.coded_weights import coded_shapes
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.types.samples import Sample
from tests.gpu.rollout.graph_case import DEVICE, SPEC, USUAL, new_engine, unequal, workload
from tests.samples import finish

CODED = replace(USUAL, weights="e4m3")


def model_of(cfg: NativeEngineConfig) -> CausalLM:
    """Return a model with codes, or with what they stand for."""
    model = CausalLM(SPEC).to(torch.bfloat16)
    hold_codes(model, SPEC, cfg.weights)
    model = model.to(DEVICE).requires_grad_(False)
    convert = as_codes if cfg.weights == "e4m3" else as_rounded
    fill(model, convert(random_weights(SPEC, 0), SPEC, "e4m3"))
    return model


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, int], Sample]:
    return finish(new_engine(model_of(USUAL), USUAL), workload())


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("max_batch", [24, 64, 5])
def test_codes_draw_the_samples_of_their_numbers(expected, graphs: bool, max_batch: int) -> None:
    cfg = replace(CODED, cuda_graphs=graphs, max_batch=max_batch)
    engine = new_engine(model_of(cfg), cfg)
    assert unequal(finish(engine, workload()), expected) == 0
    assert (engine.stats()["num_graphs"] > 0) == graphs


def test_projections_of_codes_are_fused() -> None:
    engine = new_engine(model_of(CODED), CODED)
    joined = [one.joined for one in engine.model.modules() if isinstance(one, FusableLayer)]
    assert joined and all(isinstance(one, FusedProjections) for one in joined)


def test_control_one_code_changes_samples(expected) -> None:
    model = model_of(CODED)
    with torch.no_grad():
        for name in coded_shapes(SPEC, "e4m3"):
            model.get_parameter(name).view(torch.uint8)[3, 5] ^= 0x40
    assert unequal(finish(new_engine(model, CODED), workload()), expected) > 0
