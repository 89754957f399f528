"""Weight files drawn at random, in every form in which a folder may hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.model.drawn import Draw, write

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Tensors = dict[str, torch.Tensor]


def draw_weights(draw: Draw, plain: dict[str, Any], folder: Path) -> None:
    """Write random weights of the network, in one of the forms in which files may hold them."""
    config = AutoConfig.for_model(
        **{key: value for key, value in plain.items() if not key.startswith("rope_")}
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(draw.seed)
    tensors: Tensors = {}
    for name, one in model.named_parameters():
        drawn = torch.randn(one.shape, generator=generator)
        tensors[name] = drawn * 0.2 + (one.ndim == 1 and name.endswith("weight"))
    if draw.chance(0.2):
        dtype = draw.random.choice([torch.float16, torch.bfloat16, torch.float64])
        tensors = {name: one.to(dtype) for name, one in tensors.items()}
    _odd_tensor(draw, tensors)
    usual = [_single, _shards, _shards_in_folders, _both, _stray]
    odd = [_odd_index, _twice, _only_stray, _adapter]
    draw.random.choice(odd if draw.chance(0.1) else usual)(draw, tensors, folder)


def _odd_tensor(draw: Draw, tensors: Tensors) -> None:
    if HEAD not in tensors and draw.chance(0.6):
        match draw.random.choice(["equal", "equal", "alone", "alone", "other"]):
            case "equal":
                tensors[HEAD] = tensors[EMBEDDING].clone()
            case "other":
                tensors[HEAD] = tensors[EMBEDDING] + 1
                draw.suspect("tie_word_embeddings")
            case "alone":
                tensors[HEAD] = tensors.pop(EMBEDDING)
    if draw.chance(0.2):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.rotary_emb.inv_freq"] = torch.ones(4)
    if draw.chance(0.1):
        name = draw.random.choice(sorted(set(tensors) - {HEAD, EMBEDDING}))
        draw.suspect(name)
        match draw.random.choice(["missing", "unknown", "integers", "shape"]):
            case "missing":
                del tensors[name]
            case "unknown":
                tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(3)
                draw.suspect("model.layers.7.mlp.up_proj.weight")
            case "integers":
                tensors[name] = tensors[name].to(torch.int8)
            case "shape":
                tensors[name] = torch.cat([tensors[name], tensors[name]])


def _single(draw: Draw, tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / SINGLE)


def _shards(draw: Draw, tensors: Tensors, folder: Path, under: str = "") -> None:
    names = list(tensors)
    halves = {
        f"{under}model-{part + 1:05d}-of-00002.safetensors": names[part::2] for part in range(2)
    }
    for file, part in halves.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file({name: tensors[name] for name in part}, folder / file)
    write(
        folder / INDEX,
        {
            "metadata": {},
            "weight_map": {name: file for file, part in halves.items() for name in part},
        },
    )


def _shards_in_folders(draw: Draw, tensors: Tensors, folder: Path) -> None:
    _shards(draw, tensors, folder, under="weights/")


def _both(draw: Draw, tensors: Tensors, folder: Path) -> None:
    """Write a file beside older shards, as a folder has that was saved twice."""
    _shards(draw, {name: one.flip(0).contiguous() for name, one in tensors.items()}, folder)
    _single(draw, tensors, folder)


def _stray(draw: Draw, tensors: Tensors, folder: Path) -> None:
    draw.random.choice([_single, _shards])(draw, tensors, folder)
    name = draw.random.choice(
        ["old_model.safetensors", "a.safetensors", "model-00001-of-00003.safetensors"]
    )
    save_file({name: one * 2 for name, one in tensors.items()}, folder / name)


def _odd_index(draw: Draw, tensors: Tensors, folder: Path) -> None:
    _shards(draw, tensors, folder)
    index = json.loads((folder / INDEX).read_text())
    file = draw.random.choice(["../other.safetensors", "/other.safetensors", "gone.safetensors", 3])
    index["weight_map"][HEAD] = file
    draw.suspect("weight_map" if file == 3 else str(file))
    write(folder / INDEX, index)


def _twice(draw: Draw, tensors: Tensors, folder: Path) -> None:
    _shards(draw, tensors, folder)
    first, *rest = tensors
    save_file(
        {name: tensors[name] * 2 for name in (first, *rest[::2])},
        folder / "model-00002-of-00002.safetensors",
    )
    draw.suspect("both hold")


def _only_stray(draw: Draw, tensors: Tensors, folder: Path) -> None:
    save_file(tensors, folder / "weights.safetensors")
    draw.suspect(SINGLE)


def _adapter(draw: Draw, tensors: Tensors, folder: Path) -> None:
    _single(draw, tensors, folder)
    write(folder / "adapter_config.json", {"peft_type": "LORA"})
    draw.suspect("adapter_config.json")
