"""Export of weights as a Hugging Face folder, from a live trainer or by `spmd-rl export`."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.controller.run.checksums import check
from spmd_rl.errors import ConfigError
from spmd_rl.kernels.low_precision.e4m3_blocks import CODE
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.hf import save_folder
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.peft_folder import save_adapters
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import VALUE_HEAD, Head
from spmd_rl.train.backend import ModelBackend
from spmd_rl.train.checkpoint.checkpoint_index import WEIGHTS, Index, read_index
from spmd_rl.train.checkpoint.shards import ShardReader


def export_saved(
    folder: str | Path, like: str | Path, target: str | Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, one tensor at a time.

    Config and tokenizer come from the folder `like`. Adapters make a PEFT folder.
    Raises: as `checkpoint.load`, and ConfigError where `like` is no model folder, or another's, or
    for adapters in 8 bits.
    """
    with saved_weights(folder, like) as weights:
        if weights.lora.rank:
            if dtype == CODE:
                raise ConfigError(f"{folder} holds adapters, which are not written in 8 bits")
            save_adapters(target, like, weights.lora, weights.tensors, dtype)
        else:
            save_folder(target, like, weights.tensors, dtype, weights.head)


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a checkpoint: their version, and each tensor with its name, read when it is due.

    With a rank in `lora`, they are adapters.
    """

    version: int
    head: Head
    lora: LoraConfig
    tensors: Iterator[tuple[str, Tensor]]


@contextmanager
def saved_weights(folder: str | Path, like: str | Path) -> Iterator[SavedWeights]:
    """Open the weights of a trainer's folder in a checkpoint, which fit the model folder `like`.

    Raises: as `checkpoint.load`, and ConfigError where `like` is no model folder, or another's.
    """
    path = Path(folder)
    index = read_index(path)
    weights = index.tensors[WEIGHTS]
    _check_weight_files(path, index)
    head, spec = _head_of(weights), read_spec(like)
    lora = LoraConfig.parse(str(index.contract.get("lora", "")))
    shapes = lora.shapes(spec) if lora.rank else spec.parameter_shapes(head)
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise ConfigError(
            f"{folder} holds the weights of another model than the config.json in {like}"
        )
    with ShardReader(path, index) as reader:
        tensors = ((name, reader.whole(WEIGHTS, name)) for name in shapes)
        yield SavedWeights(index.progress.version, head, lora, tensors)


def _check_weight_files(folder: Path, index: Index) -> None:
    """Raise a SpmdError if a file that holds weights has changed."""
    weights = index.tensors[WEIGHTS].values()
    files = {shard.file for tensor in weights for shard in tensor.shards}
    check(folder, {file: index.files[file] for file in files})


def export_hf(
    folder: str,
    like: str,
    backend: ModelBackend,
    context: RoleContext,
    dtype: str,
    lora: LoraConfig = NO_LORA,
) -> None:
    """Write a trainer's weights as a Hugging Face folder, gathering one tensor at a time.

    Config and tokenizer come from the folder `like`. Adapters make a PEFT folder.
    Ranks: all of the role. Blocks: until the folder is written.
    """
    tensors = _gathered(backend)
    try:
        if context.rank == 0:
            target_dtype = getattr(torch, dtype)
            if lora.rank:
                save_adapters(folder, like, lora, tensors, target_dtype)
            else:
                save_folder(folder, like, tensors, target_dtype, _head_of(backend.names()))
    finally:
        # The other ranks gather every tensor, so this rank must too, even if its disk is full.
        for _ in tensors:
            pass
    context.barrier()


def _head_of(names: Container[str]) -> Head:
    return "value" if VALUE_HEAD in names else "lm"


def _gathered(backend: ModelBackend) -> Iterator[tuple[str, Tensor]]:
    for name in backend.names():
        yield name, backend.gather(name)
