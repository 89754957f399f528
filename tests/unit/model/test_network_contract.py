"""The contract of a network: that of the kernels, and a digest of the code that puts them together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from spmd_rl.kernels import contract
from spmd_rl.kernels.contract import digest_of
from spmd_rl.model import network
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec

CPU = torch.device("cpu")
MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"


def test_the_code_of_the_network_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(MODEL))
    facts = model.contract(CPU, torch.float32)
    rest = contract(CPU, torch.float32, model.spec.head_dim)
    table = facts.pop("rotary_table")
    assert facts == rest | {"network": digest_of(network.SOURCES)}
    assert re.fullmatch("[0-9a-f]{16}", str(table))
    edited = tmp_path / "network.py"
    edited.write_text(network.SOURCES[0].read_text() + "\n")
    monkeypatch.setattr(network, "SOURCES", (edited, *network.SOURCES[1:]))
    assert model.contract(CPU, torch.float32)["network"] != facts["network"]


def test_a_bit_of_the_rotary_table_is_part_of_it() -> None:
    """As of a host whose cosine rounds another way."""
    with torch.device("meta"):
        model = CausalLM(ModelSpec.from_folder(MODEL))
    facts = model.contract(CPU, torch.float32)
    assert facts == model.contract(CPU, torch.float32)
    cosines, _ = model.rope_tables(CPU)
    cosines.view(torch.int32)[7, 3] ^= 1
    changed = model.contract(CPU, torch.float32)
    assert {key for key, value in facts.items() if changed[key] != value} == {"rotary_table"}
