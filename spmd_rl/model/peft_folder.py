"""PEFT folders: adapters as the library `peft` writes and reads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.model.companion_files import TOKENIZER_FILES, copy_files
from spmd_rl.model.hf import read_stored
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.read import ADAPTER
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
    """
    target = Path(folder)
    part = atomic_write.begin_folder(target)
    copy_files(base, part, TOKENIZER_FILES)
    (part / ADAPTER).write_text(json.dumps(_config(base, lora), indent=2) + "\n")
    named = {
        PREFIX + name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors
    }
    save_file(named, part / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    atomic_write.finish_folder(target)


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
