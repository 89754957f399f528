"""Folders in block FP8: what transformers makes of them, a float64 oracle, and our own codes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.formats.coded_weights import coded_shapes, scale_name
from spmd_rl.model.formats.e4m3 import E4M3
from spmd_rl.model.formats.folders import CONFIG_KEY
from spmd_rl.model.hf import model_weights, random_weights, save_folder
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.mixtures import write_mixture

# transformers finds blocks by dividing sizes, so that these are multiples of a block
ALIGNED = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 104,
}
RAGGED = {"num_hidden_layers": 2, "intermediate_size": 136, "moe_intermediate_size": 136}
FAMILIES = ("qwen3", "qwen3_moe", "glm4_moe")


def write(folder: Path, family: str, sizes: Mapping[str, int]) -> Path:
    """Write a model folder with float32 weights."""
    sizes = sizes | ({"moe_intermediate_size": 128} if sizes is ALIGNED else {})
    if family != "qwen3":
        return write_mixture(folder, family, sizes)
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(random_weights(read_spec(folder), 1)), folder / "model.safetensors")
    return folder


def exported(tmp_path: Path, family: str, sizes: Mapping[str, int]) -> tuple[Path, Path]:
    """Return a folder, and the same weights in block FP8."""
    full = write(tmp_path / "full", family, sizes)
    save_folder(tmp_path / "fp8", full, weights_of(full).items(), torch.float8_e4m3fn)
    return full, tmp_path / "fp8"


def weights_of(folder: Path) -> dict[str, Tensor]:
    return dict(model_weights(folder, read_spec(folder).parameter_shapes()))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_read_back_to_the_numbers_of_its_codes(tmp_path: Path, family: str) -> None:
    full, folder = exported(tmp_path, family, RAGGED)
    stored, back, spec = (
        load_file(folder / "model.safetensors"),
        weights_of(folder),
        read_spec(full),
    )
    coded = coded_shapes(spec, "e4m3")
    for name, weight in weights_of(full).items():
        if name not in coded:
            fixed = name in spec.fixed_names()
            assert torch.equal(back[name], weight if fixed else weight.bfloat16()), name
            continue
        found = block_codes.quantised(E4M3, weight)
        assert torch.equal(stored[name].view(torch.uint8), found.codes.view(torch.uint8))
        assert torch.equal(stored[scale_name(name)], found.scales)
        assert torch.equal(back[name], found.decoded(torch.float32))
        # an engine or a trainer in 8 bits has these numbers again
        assert torch.equal(
            block_codes.quantised(E4M3, back[name]).decoded(torch.float32), back[name]
        )
    assert {scale_name(name) for name in coded} <= stored.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model(tmp_path: Path, family: str) -> None:
    _, folder = exported(tmp_path, family, ALIGNED)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = tmp_path / "plain"
    save_folder(plain, folder, weights_of(folder).items())
    assert CONFIG_KEY not in json.loads((plain / "config.json").read_text())
    ours = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    expected = dict(ours.named_parameters())
    found = dict(theirs.named_parameters())
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert torch.equal(one.float(), expected[name]), name


def published(folder: Path, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Write scales that are no powers of two, in two files, and return what they should give."""
    stored = load_file(folder / "model.safetensors")
    generator, expected = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for name in coded_shapes(read_spec(folder), "e4m3"):
        scales = torch.rand(stored[scale_name(name)].shape, generator=generator) + 0.01
        stored[scale_name(name)] = scales = scales.to(scale_dtype)
        rows, columns = stored[name].shape
        wide = scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        expected[name] = stored[name].double() * wide[:rows, :columns]
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
    (folder / "model.safetensors").unlink()
    save_file(stored, folder / "a.safetensors")
    save_file(scales, folder / "b.safetensors")
    files = dict.fromkeys(stored, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_any_size_give_the_nearest_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    _, folder = exported(tmp_path, "qwen3_moe", RAGGED)
    expected, found = published(folder, dtype), weights_of(folder)
    for name, one in expected.items():
        assert torch.equal(found[name], one.float()), name


def _changed(tmp_path: Path, **changes: Any) -> tuple[Path, str]:
    """Return a folder of which the first weight in 8 bits is changed, and the weight's name."""
    _, folder = exported(tmp_path, "qwen3", RAGGED)
    stored = load_file(folder / "model.safetensors")
    name = sorted(coded_shapes(read_spec(folder), "e4m3"))[0]
    if "scale" in changes:
        stored[scale_name(name)].view(-1)[-1] = changes["scale"]
    if "code" in changes:
        stored[name].view(torch.uint8).view(-1)[-1] = changes["code"]
    if "zero_block" in changes:
        stored[name].view(torch.uint8).fill_(changes["zero_block"])
    if "dtype" in changes:
        stored[scale_name(name)] = stored[scale_name(name)].to(changes["dtype"])
    save_file(stored, folder / "model.safetensors")
    return folder, name


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 3e38, 8e35, -1.0, -1e-30])
def test_scales_that_give_no_weights_are_refused(tmp_path: Path, scale: float) -> None:
    folder, name = _changed(tmp_path, scale=scale)
    with pytest.raises(ConfigError, match=f"{scale_name(name)} holds scales that are negative"):
        weights_of(folder)


def test_a_scale_of_zero_is_that_of_a_block_of_zeros(tmp_path: Path) -> None:
    folder, name = _changed(tmp_path / "refused", scale=0.0)
    with pytest.raises(ConfigError, match=f"{scale_name(name)} holds a scale of 0 for weights"):
        weights_of(folder)
    folder, name = _changed(tmp_path / "read", scale=0.0, zero_block=0)
    assert not weights_of(folder)[name].any()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_number_are_refused(tmp_path: Path, code: int) -> None:
    folder, name = _changed(tmp_path, code=code)
    with pytest.raises(ConfigError, match=f"{name} holds NaN"):
        weights_of(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_scales_of_another_type_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, name = _changed(tmp_path, dtype=dtype)
    with pytest.raises(ConfigError, match=f"{scale_name(name)} as "):
        weights_of(folder)


def test_weights_in_8_bits_without_their_scales_are_refused(tmp_path: Path) -> None:
    _, folder = exported(tmp_path, "qwen3", RAGGED)
    stored = load_file(folder / "model.safetensors")
    name = sorted(coded_shapes(read_spec(folder), "e4m3"))[0]
    scales = stored.pop(scale_name(name))
    for others in ({}, {scale_name(name): torch.ones(())}, {scale_name(name): scales.repeat(2, 1)}):
        save_file(stored | others, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=f"{name} in 8 bits, and not {scale_name(name)}"):
            weights_of(folder)


@pytest.mark.parametrize(
    "change",
    [{"weight_block_size": [64, 128]}, {"fmt": "e5m2"}, {"quant_method": "awq"}],
    ids=str,
)
def test_another_layout_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    _, folder = exported(tmp_path, "qwen3", RAGGED)
    config = json.loads((folder / "config.json").read_text())
    config[CONFIG_KEY] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"quantization_config is set, and of quantized"):
        read_spec(folder)
