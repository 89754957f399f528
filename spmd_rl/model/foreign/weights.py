"""Weights of models that `transformers` computes: it reads their folders, and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.model.foreign.names import folder_of
from spmd_rl.model.foreign.network import skeleton


def foreign_weights(model: str | Path, seed: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model on the CPU, by the names of its network.

    They are those of its folder, in its dtype, or with a `seed` the first ones of transformers.
    Host memory has all of them at once.
    Raises: ConfigError where the folder does not load, or lacks some.
    """
    from transformers import AutoModelForCausalLM

    if seed is None:
        network = _loaded(folder_of(model))
    else:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            config = skeleton(model).config
            network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in network.named_parameters():
        yield name, parameter.detach()


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    options = {"dtype": "auto", "trust_remote_code": False, "local_files_only": True}
    try:
        network, found = AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"transformers does not load {folder}: {error}") from None
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{folder} lacks {len(missing)} weights, first {missing[0]}")
    return network


def write_foreign(
    folder: Path, model: str | Path, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    """Write the weights to an empty folder, as `transformers` names them there.

    Host memory has all of them at once.
    """
    network = skeleton(model)
    state = {name: one.detach().to("cpu", dtype, copy=True) for name, one in tensors}
    network.load_state_dict(state, strict=False, assign=True)
    network.tie_weights()
    network.save_pretrained(folder)
