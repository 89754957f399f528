"""Numeric contract of a network: the kernels' contract and the model's own facts."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from spmd_rl.kernels import contract
from spmd_rl.kernels.contract import digest_of
from spmd_rl.model import model_contract
from spmd_rl.model.layers.gqa import Gqa
from spmd_rl.model.layers.mlp import Mlp
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.rope_spec import RopeSpec
from spmd_rl.model.spec import ModelSpec
from tests.specs import attention_of, with_layers

CPU = torch.device("cpu")
MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"


def test_the_code_of_the_network_is_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = CausalLM(read_spec(MODEL))
    facts = model.contract(CPU, torch.float32)
    rest = contract(CPU, torch.float32, attention_of(model.spec).head_dim)
    table = facts.pop("rotary_table")
    own = {"network": digest_of(model_contract.SOURCES), "model": model.spec.arithmetic}
    assert facts == rest | own
    assert re.fullmatch("[0-9a-f]{16}", str(table))
    edited = tmp_path / "network.py"
    edited.write_text(model_contract.SOURCES[0].read_text() + "\n")
    monkeypatch.setattr(model_contract, "SOURCES", (edited, *model_contract.SOURCES[1:]))
    assert model.contract(CPU, torch.float32)["network"] != facts["network"]


OTHERWISE = {
    "row_shards": 2,
    "vocab_size": 105,
    "hidden_size": 128,
    "max_positions": 64,
    "rms_eps": 1e-5,
    "tie_embeddings": False,
}
LAYERS_OTHERWISE = {
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "qkv_bias": True,
    "out_bias": True,
    "qk_norm": False,
    "zero_centred": True,
    "gated": True,
    "window": 7,
    "has_sinks": True,
    "intermediate_size": 96,
    "bias": True,
}
SPEC = read_spec(MODEL)
OTHER_MODELS = {
    **{field: replace(SPEC, **{field: value}) for field, value in OTHERWISE.items()},
    **{field: with_layers(SPEC, **{field: value}) for field, value in LAYERS_OTHERWISE.items()},
    "the layers' epsilon": with_layers(SPEC, rms_eps=1e-5),
    "blocks": replace(SPEC, blocks=SPEC.blocks[:2]),
    "rope": replace(SPEC, rope=RopeSpec(SPEC.rope.size, 1e6)),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_what_a_model_computes_by_is_part_of_it(name: str) -> None:
    """Models with the same weight layout may compute differently, as with another epsilon."""
    if name == "hidden_size":
        other = with_layers(OTHER_MODELS[name], hidden_size=128)
        other = replace(other, blocks=tuple(replace(b, hidden_size=128) for b in other.blocks))
    else:
        other = OTHER_MODELS[name]
    with torch.device("meta"):
        ours, theirs = (CausalLM(one).contract(CPU, torch.float32) for one in (SPEC, other))
    assert ours != theirs


def test_nothing_of_a_model_is_forgotten() -> None:
    own = {field.name for field in fields(ModelSpec)}
    of_layers = {field.name for kind in (Gqa, Mlp) for field in fields(kind)}
    # the last are of tensors of the folder that no forward pass reads, and of names
    assert own - OTHER_MODELS.keys() == {
        "family",
        "eos_ids",
        "init_std",
        "unused",
        "folder_prefix",
    }
    assert of_layers - OTHER_MODELS.keys() == {"name"}


def test_a_bit_of_the_rotary_table_is_part_of_it() -> None:
    """A host's cosine may round differently."""
    with torch.device("meta"):
        model = CausalLM(read_spec(MODEL))
    facts = model.contract(CPU, torch.float32)
    assert facts == model.contract(CPU, torch.float32)
    cosines, _ = model.rope_tables(CPU)
    cosines.view(torch.int32)[7, 3] ^= 1
    changed = model.contract(CPU, torch.float32)
    assert {key for key, value in facts.items() if changed[key] != value} == {"rotary_table"}


def test_tables_serve_gradients_where_an_engine_asked_for_them_first() -> None:
    """On a device other than the host the tables are copies, which are made in that context too."""
    with torch.device("meta"):
        model = CausalLM(read_spec(MODEL))
    with torch.inference_mode():
        tables = model.rope_tables(torch.device("meta"))
    assert not any(one.is_inference() for one in tables)
