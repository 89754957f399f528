"""Experts that a folder holds stacked, two tensors a layer, as transformers 5 may write them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.errors import ConfigError
from spmd_rl.model.hf import model_weights, save_folder
from spmd_rl.model.read import read_spec
from tests.dist.recipes.mixtures import write_mixture

FAMILIES = ("qwen3_moe", "glm4_moe")
SIZES = {"num_hidden_layers": 3}


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(model_weights(folder, read_spec(folder).parameter_shapes()))


def stacked(tmp_path: Path, family: str) -> tuple[Path, Path]:
    """Return a folder, and what transformers writes of it with stacked experts."""
    plain, target = write_mixture(tmp_path / "plain", family, SIZES), tmp_path / "stacked"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.save_pretrained(target, save_original_format=False)
    return plain, target


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_same_weights(tmp_path: Path, family: str) -> None:
    plain, folder = stacked(tmp_path, family)
    names = load_file(folder / "model.safetensors").keys()
    assert any(name.endswith(".experts.gate_up_proj") for name in names)
    expected, found = weights_of(plain), weights_of(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(one, expected[name]) for name, one in found.items())


def test_a_part_of_them_is_read_alone(tmp_path: Path) -> None:
    plain, folder = stacked(tmp_path, "qwen3_moe")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    shapes = read_spec(folder).parameter_shapes()
    [(found, tensor)] = model_weights(folder, shapes, held={name})
    assert found == name and torch.equal(tensor, weights_of(plain)[name])


def test_an_export_has_them_one_by_one(tmp_path: Path) -> None:
    plain, folder = stacked(tmp_path, "glm4_moe")
    save_folder(tmp_path / "hf", folder, weights_of(folder).items())
    expected, found = weights_of(plain), load_file(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda one: one[:-1], r"lacks 2 weights of its config, first .*experts.7.gate_proj"),
        (lambda one: one[:, :-1], r"experts.gate_up_proj is \[79, "),
        (lambda one: one.repeat(2, 1, 1), r"holds .*experts\.8\.gate_proj.weight, which"),
    ],
)
def test_other_shapes_are_refused(tmp_path: Path, change, sentence: str) -> None:
    _, folder = stacked(tmp_path, "qwen3_moe")
    stored = load_file(folder / "model.safetensors")
    key = "model.layers.0.mlp.experts.gate_up_proj"
    stored[key] = change(stored[key]).contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=sentence):
        weights_of(folder)
