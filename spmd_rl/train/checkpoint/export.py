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
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_tensors import as_rounded, format_written_as
from spmd_rl.model.formats.coded_weights import format_of
from spmd_rl.model.hf import model_weights, random_weights, save_folder
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.peft_folder import dropped_by_peft, save_adapters, save_merged
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import VALUE_HEAD, Head
from spmd_rl.train.backend import ModelBackend
from spmd_rl.train.build import first_weights
from spmd_rl.train.checkpoint.checkpoint_index import WEIGHTS, Index, read_index
from spmd_rl.train.checkpoint.model_card import write_card
from spmd_rl.train.checkpoint.shards import ShardReader
from spmd_rl.train.config import TrainerConfig

MERGED_NOTE = "The adapters that were trained are merged into the weights."
DROPPED_NOTE = "PEFT would drop some of these adapters, so they are merged into the weights."


def export_saved(
    folder: str | Path,
    like: str | Path,
    target: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    merge: bool = False,
    seed: int | None = None,
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder, one tensor at a time.

    Config and tokenizer come from the folder `like`. Adapters make a PEFT folder, or are merged
    into their base, whose weights are random with a `seed`.
    Raises: as `checkpoint.load`, and ConfigError where `like` is no model folder, or another's, for
    adapters in 8 bits or that PEFT does not hold, and for a merge without adapters.
    """
    with saved_weights(folder, like) as weights:
        is_adapter = weights.lora.rank > 0 and not merge
        if merge and not weights.lora.rank:
            raise ConfigError(f"{folder} holds no adapters to merge: leave --merge out")
        if is_adapter and format_written_as(dtype) != "full":
            raise ConfigError(
                f"{folder} holds adapters, which are not written in 8 bits: add --merge"
            )
        if is_adapter:
            save_adapters(target, like, weights.lora, weights.tensors, dtype)
        elif merge:
            spec = read_spec(like)
            shapes = spec.parameter_shapes()
            base = model_weights(like, shapes) if seed is None else random_weights(spec, seed)
            base = as_rounded(base, spec, weights.base_format)
            save_merged(target, like, weights.lora, dict(weights.tensors), base, dtype)
        else:
            save_folder(target, like, weights.tensors, dtype, weights.head)


@dataclass(frozen=True)
class SavedWeights:
    """Weights of a checkpoint: their version, and each tensor with its name, read when it is due.

    With a rank in `lora`, they are adapters, and `base_format` is that of their base.
    """

    version: int
    head: Head
    lora: LoraConfig
    tensors: Iterator[tuple[str, Tensor]]
    base_format: WeightFormat = "full"


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
        base_format = format_of(str(index.contract.get("weights", "")))
        yield SavedWeights(index.progress.version, head, lora, tensors, base_format)


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
    cfg: TrainerConfig,
) -> None:
    """Write a trainer's weights as a Hugging Face folder, gathering one tensor at a time.

    Config and tokenizer come from the folder `like`. Adapters make a PEFT folder, or are merged
    where PEFT would drop some of them.
    Ranks: all of the role. Blocks: until the folder is written.
    """
    tensors = _gathered(backend)
    try:
        if context.rank == 0:
            _write(folder, like, cfg, tensors, getattr(torch, dtype), _head_of(backend.names()))
    finally:
        # The other ranks gather every tensor, so this rank must too, even if its disk is full.
        for _ in tensors:
            pass
    context.barrier()


def _write(
    folder: str,
    like: str,
    cfg: TrainerConfig,
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    head: Head,
) -> None:
    """Write a live trainer's folder, and its card with what the folder around it says of a run."""
    spec, lora, note = read_spec(like), cfg.lora, ""
    if not lora.rank:
        save_folder(folder, like, tensors, dtype, head)
    elif dropped_by_peft(lora, spec):
        note = DROPPED_NOTE
        print(f"{folder}: {note}", flush=True)
        base = as_rounded(first_weights(cfg, like, head), spec, cfg.weights)
        save_merged(folder, like, lora, dict(tensors), base, dtype)
    else:
        save_adapters(folder, like, lora, tensors, dtype)
    write_card(Path(folder), Path(folder).parent, like, note=note)


def _head_of(names: Container[str]) -> Head:
    return "value" if VALUE_HEAD in names else "lm"


def _gathered(backend: ModelBackend) -> Iterator[tuple[str, Tensor]]:
    for name in backend.names():
        yield name, backend.gather(name)
