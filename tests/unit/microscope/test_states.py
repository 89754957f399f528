"""Layers that hand a state on: faults in them are found where they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.kernels.delta.rule import DeltaWeights
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.page.verdict import verdict
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass
from spmd_rl.microscope.taps.points import Point
from spmd_rl.model.hf import fill, random_weights
from spmd_rl.model.layers.delta_module import DeltaMixer
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.unit.kernels.delta.chunked import chunked_gated_delta
from tests.unit.model.hybrids import CONFIGS

CONFIG = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40, num_pages=200)
FIRST = Point(0, "delta")


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], CausalLM]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_next"]))
    spec = read_spec(folder)

    def build() -> CausalLM:
        model = CausalLM(spec).requires_grad_(False)
        fill(model, random_weights(spec, 1))
        return model

    return build


@pytest.fixture(scope="module")
def case() -> ReplayCase:
    rng = np.random.default_rng(0)
    return ReplayCase(
        tuple(
            ReplaySequence(f"{number}:0", rng.integers(2, 90, 9), rng.integers(2, 90, length))
            for number, length in enumerate((12, 30))
        )
    )


def trainer(model: CausalLM) -> TrainerPass:
    return TrainerPass(model, max_tokens=64, logit_rows=16)


def test_a_state_in_bfloat16_is_found(new_model: Callable[[], CausalLM], case: ReplayCase) -> None:
    engine = EnginePass(new_model(), CONFIG)
    plant("state-bf16", engine)
    comparison = compare(engine, trainer(new_model()), case)
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == FIRST
    assert verdict(comparison, case, ("engine", "trainer")).startswith(f"{FIRST}: ")


def test_the_form_in_chunks_in_a_trainer_is_found(
    new_model: Callable[[], CausalLM], case: ReplayCase
) -> None:
    model = new_model()
    mixer = next(one for one in model.modules() if isinstance(one, DeltaMixer))

    def in_chunks(qkv: Tensor, b: Tensor, a: Tensor, attend: PackedAttention) -> Tensor:
        (rows, states), *others = attend.sequences(mixer.number)
        assert not others
        weights = DeltaWeights(mixer.conv1d.weight, mixer.dt_bias, mixer.A_log)
        mixed = torch.zeros(len(qkv), mixer.heads.values, mixer.heads.value_dim)
        mixed[rows] = chunked_gated_delta(
            qkv[rows], b[rows], a[rows], weights, mixer.heads, states.lengths
        )
        return mixed

    mixer._mixed = in_chunks  # type: ignore[method-assign, assignment]
    comparison = compare(EnginePass(new_model(), CONFIG), trainer(model), case)
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == FIRST


def test_nothing_is_found_without_a_fault(
    new_model: Callable[[], CausalLM], case: ReplayCase
) -> None:
    comparison = compare(EnginePass(new_model(), CONFIG), trainer(new_model()), case)
    assert comparison.agree and {point.op for point in comparison.points} >= {"delta", "router"}


def test_other_models_have_no_state_to_round(tmp_path: Path) -> None:
    config = CONFIGS["qwen3_5_text"] | {"layer_types": ["full_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = EnginePass(CausalLM(read_spec(tmp_path)).requires_grad_(False), CONFIG)
    with pytest.raises(ConfigError, match="needs a model whose layers hand on a state"):
        plant("state-bf16", engine)
