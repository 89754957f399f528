"""Tensors of a folder that the network does not use: not loaded, and in every export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.errors import ConfigError
from spmd_rl.model.families import FAMILIES
from spmd_rl.model.families.family import Family
from spmd_rl.model.hf import load_weights, random_weights, read_weights, save_folder
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from tests.planted import family

BESIDE = {
    "model.layers.3.eh_proj.weight": torch.randn(3, 5).bfloat16(),
    "model.layers.3.gate.bias": torch.randn(4),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    planted = Family("Planted", family.PLANTED.read, lambda config: ("model.layers.3.",))
    monkeypatch.setitem(FAMILIES, "planted_moe", planted)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.CONFIG))
    save_file(dict(random_weights(read_spec(folder), 0)) | BESIDE, folder / "model.safetensors")
    return folder


def test_an_export_has_them_as_they_were(folder: Path, tmp_path: Path) -> None:
    model = CausalLM(read_spec(folder))
    load_weights(model, folder)
    assert dict(model.named_parameters()).keys() == read_spec(folder).parameter_shapes().keys()
    save_folder(tmp_path / "out", folder, model.named_parameters(), torch.float16)
    found = dict(read_weights(tmp_path / "out"))
    assert found.keys() == dict(read_weights(folder)).keys()
    for name, one in BESIDE.items():
        assert found[name].dtype == one.dtype and torch.equal(found[name], one)
    assert found["lm_head.weight"].dtype == torch.float16


def test_a_folder_may_lack_them(folder: Path) -> None:
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if k not in BESIDE}
    save_file(kept, folder / "model.safetensors")
    load_weights(CausalLM(read_spec(folder)), folder)


def test_others_are_refused(folder: Path) -> None:
    """A negative control."""
    more = load_file(folder / "model.safetensors") | {"model.layers.4.x": torch.ones(1)}
    save_file(more, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.4\.x, which the model"):
        load_weights(CausalLM(read_spec(folder)), folder)
