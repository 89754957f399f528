"""PEFT folders: adapters as the library `peft` writes and reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.model.companion_files import TOKENIZER_FILES, copy_files
from spmd_rl.model.hf import read_stored, save_folder
from spmd_rl.model.layers.mlp import PROJECTIONS as MLP_PROJECTIONS
from spmd_rl.model.layers.moe import is_of_expert
from spmd_rl.model.linear import merged
from spmd_rl.model.lora import A, B, LoraConfig
from spmd_rl.model.read import ADAPTER, read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.stored_adapters import ADAPTER_WEIGHTS, PREFIX, stored_adapters
from spmd_rl.observe import atomic_write


def read_adapters(lora: LoraConfig, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of `lora.folder` by name, on the CPU. Raises: as `stored_adapters`."""
    return read_stored(stored_adapters(lora, spec))


def save_adapters(
    folder: str | Path,
    base: str | Path,
    lora: LoraConfig,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a folder that `peft` loads onto the model in the folder `base`.

    Its config names that folder by its absolute path. The tokenizer files are copied from there.
    The folder is written beside its final name, then renamed over an earlier one.
    Raises: ConfigError for adapters that PEFT would not read back.
    """
    spec = read_spec(base)
    if dropped := dropped_by_peft(lora, spec):
        raise ConfigError(
            f"PEFT would drop {len(dropped)} of these adapters, such as that of {dropped[0]}, "
            "because it reads the projections of a mixture as its experts alone: write merged "
            "weights with `spmd-rl export RUN TARGET --merge`"
        )
    target = Path(folder)
    part = atomic_write.begin_folder(target)
    copy_files(base, part, TOKENIZER_FILES)
    (part / ADAPTER).write_text(json.dumps(_config(base, lora.of_model(spec)), indent=2) + "\n")
    named = {
        PREFIX + name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors
    }
    save_file(named, part / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    atomic_write.finish_folder(target)


def dropped_by_peft(lora: LoraConfig, spec: ModelSpec) -> list[str]:
    """Return the layers whose adapters PEFT does not load: of a model with experts that have
    adapters, the MLPs that are no experts.
    """
    ending = f".{A}.weight"
    names = [name for name in lora.shapes(spec) if name.endswith(ending)]
    layers = [name.removesuffix(ending) for name in names]
    mlps = [layer for layer in layers if layer.rpartition(".")[2] in MLP_PROJECTIONS]
    others = [layer for layer in mlps if not is_of_expert(layer)]
    return others if 0 < len(others) < len(mlps) else []


def save_merged(
    folder: str | Path,
    base: str | Path,
    lora: LoraConfig,
    adapters: Mapping[str, Tensor],
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write whole weights: those of the base, which are `weights`, with the adapters merged.

    The merge is that of PEFT. Config and tokenizer come from the folder `base`.
    """
    save_folder(folder, base, _merged(weights, lora, adapters), dtype)


@torch.no_grad()
def _merged(
    weights: Iterable[tuple[str, Tensor]], lora: LoraConfig, adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if (a := adapters.get(f"{layer}.{A}.weight")) is not None:
            b = adapters[f"{layer}.{B}.weight"]
            weight = merged(weight.float(), a.float(), b.float(), lora.scale)
        yield name, weight


def _config(base: str | Path, lora: LoraConfig) -> dict[str, object]:
    """Return the content of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.projections),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
