"""The microscope in bfloat16, of mixtures and of layers with a state: no row differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from spmd_rl.kernels.attention.flash import flash_supports
from spmd_rl.microscope.diagnose.compare import unequal_rows
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import TrainerPass
from spmd_rl.microscope.taps.taps import HashTap
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.native.config import NativeEngineConfig
from tests.gpu.rollout.graph_case import SPEC
from tests.gpu.rollout.test_states import hybrid_spec, new_hybrid

EXPERTS = {
    "experts": Moe(512, 16, 4, 128),
    "experts, and some for all": Moe(512, 16, 4, 128, shared_size=128),
    "experts, and some for all by a gate": Moe(512, 16, 4, 128, shared_size=128, shared_gate=True),
}
SIZES = (9, 40), (200, 60), (70, 30), (3, 90)  # of prompts, and of answers


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if not flash_supports(128, torch.bfloat16, torch.device("cuda")):
        pytest.skip("needs FlashAttention-4 on a Hopper GPU")


def with_mlp(spec: ModelSpec, mlp: Moe) -> ModelSpec:
    return replace(spec, blocks=tuple(replace(block, mlp=mlp) for block in spec.blocks))


@pytest.fixture(params=["states", *EXPERTS, "experts and states"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    if request.param == "states":
        return hybrid_spec()
    if request.param == "experts and states":
        return with_mlp(hybrid_spec(), EXPERTS["experts, and some for all by a gate"])
    return with_mlp(SPEC, EXPERTS[request.param])


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_no_row_differs_after_any_op(spec: ModelSpec, cuda_graphs: bool) -> None:
    rng = np.random.default_rng(0)
    draws = ((rng.integers(2, 900, n), rng.integers(2, 900, m)) for n, m in SIZES)
    case = ReplayCase(
        tuple(ReplaySequence(f"{number}:0", *tokens) for number, tokens in enumerate(draws))
    )
    cfg = NativeEngineConfig(max_batch=8, max_step_tokens=150, cuda_graphs=cuda_graphs)
    tables = HashTap(case.num_rows), HashTap(case.num_rows)
    EnginePass(new_hybrid(spec), cfg).run(case, tables[0])
    TrainerPass(new_hybrid(spec)).run(case, tables[1])
    unequal = unequal_rows(*tables)
    assert len(unequal) > 20
    assert {point: len(rows) for point, rows in unequal.items() if len(rows)} == {}
