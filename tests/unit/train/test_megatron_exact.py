"""Which layouts of Megatron-core may claim the native engine's bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.megatron.exact import has_engine_bits
from tests.backends.megatron_case import FAMILIES, SIZES

RECOMPUTE = {"recompute_granularity": "selective"}


@pytest.fixture
def spec_of(tmp_path: Path):
    def read(family: str) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps(SIZES | FAMILIES[family]))
        return read_spec(tmp_path)

    return read


@pytest.mark.parametrize(
    ("change", "is_exact"),
    [
        ({}, True),
        ({"axes": {"pp": 2, "dp": 2, "fsdp": 2}}, True),
        ({"options": RECOMPUTE}, True),
        ({"axes": {"tp": 2}}, True),
        ({"axes": {"cp": 2, "tp": 2}}, True),
        ({"axes": {"tp": 4}}, False),  # of 2 key-value heads
        ({"axes": {"tp": 3}}, False),
        ({"options": {"fp32_residual_connection": True}}, False),
        ({"family": "qwen3_moe"}, False),
        ({"layers": "transformer_engine"}, False),
    ],
)
def test_sums_of_our_ops_in_the_contracts_order_have_the_engines_bits(
    change: dict[str, Any], is_exact: bool, spec_of
) -> None:
    cfg = MegatronConfig(
        layers=change.get("layers", "local"), model_options=change.get("options", {})
    )
    spec = spec_of(change.get("family", "qwen3"))
    assert has_engine_bits(spec, change.get("axes", {}), cfg) is is_exact
