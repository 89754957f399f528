"""Weights of a replay: a model's, those that a run ended with, or those that drew its samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.errors import ConfigError
from spmd_rl.microscope.replay.inputs import find_samples
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_tensors import as_rounded
from spmd_rl.model.hf import model_weights, random_weights, save_folder
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.linear import merged
from spmd_rl.model.lora import NO_LORA, TARGETS, A, B, LoraConfig
from spmd_rl.model.peft_folder import read_adapters
from spmd_rl.model.read import ADAPTER, read_spec
from spmd_rl.model.weight_files import has_weights
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE, read_index
from spmd_rl.train.checkpoint.export import export_saved


@dataclass(frozen=True)
class ReplayWeights:
    """A folder with weights, beside which there may be the adapters in the folder of `lora`.

    `drew_samples` is set if the samples were drawn by these weights.
    """

    folder: Path
    description: str
    drew_samples: bool = False
    lora: LoraConfig = NO_LORA

    def on_base(self, trainer: Mapping[str, Any], temporary: Path) -> ReplayWeights:
        """Return adapters with their base, if the folder holds adapters alone.

        A base that a run drew at random is written to `temporary`. `trainer` has its settings.
        """
        if not _holds_adapters(self.folder):
            return self
        is_merged = trainer.get("lora", {}).get("merged_push", False)
        lora, base = _lora_of(self.folder, is_merged), _base_of(self.folder)
        description = f"{self.description}: adapters on {base}"
        if trainer.get("init") == "random":
            seed, like, base = trainer.get("seed", 0), base, temporary / "base"
            save_folder(base, like, random_weights(read_spec(like), seed))
            description += f", with random weights of seed {seed}"
        return replace(self, folder=base, description=description, lora=lora)

    def plain(self, weights: WeightFormat, dtype: torch.dtype, temporary: Path) -> Path:
        """Return a folder for programs without adapters and codes, perhaps one in `temporary`.

        It has what the codes stand for, and adapters merged into a base of `dtype`, as by a push.
        """
        folder, spec = temporary / "plain", read_spec(self.folder)
        if not self.lora.rank and weights == "full":
            return self.folder
        if not folder.exists():
            tensors = model_weights(self.folder, spec.parameter_shapes())
            adapters = dict(read_adapters(self.lora, spec)) if self.lora.rank else {}
            rounded = as_rounded(tensors, spec, weights)
            save_folder(folder, self.folder, _merged(rounded, adapters, self.lora, dtype))
        return folder


def _merged(
    base: Iterable[tuple[str, Tensor]],
    adapters: Mapping[str, Tensor],
    lora: LoraConfig,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in base:
        layer = name.removesuffix(".weight")
        a, b = (adapters.get(f"{layer}.{one}.weight") for one in (A, B))
        if a is not None and b is not None:
            tensor = merged(tensor.to(dtype), a.float(), b.float(), lora.scale)
        yield name, tensor


def _lora_of(folder: Path, merged_push: bool) -> LoraConfig:
    config = _adapter_config(folder)
    targets = config.value("target_modules")
    return LoraConfig(
        config.count("r"),
        config.number("lora_alpha", 8.0),  # PEFT's default
        tuple(name for name in TARGETS if name in targets),
        str(folder),
        merged_push,
    )


def _holds_adapters(folder: Path) -> bool:
    return not has_weights(folder) and (folder / ADAPTER).is_file()


def _base_of(folder: Path) -> Path:
    """Return the folder of the base that the adapters in `folder` name."""
    return Path(str(_adapter_config(folder).value("base_model_name_or_path")))


def _adapter_config(folder: Path) -> Fields:
    return Fields(str(folder / ADAPTER), read_object(folder / ADAPTER))


def final_weights(run: Path) -> ReplayWeights:
    """Return the weights that the run ended with.

    Raises: ConfigError if the run exported no weights.
    """
    if not (has_weights(run / "hf") or _holds_adapters(run / "hf")):
        raise ConfigError(
            f"{run} has no weights to replay: {run / 'hf'} holds none, so name a model with --model"
        )
    return ReplayWeights(run / "hf", f"the weights in {run / 'hf'}, with which the run ended")


def sampling_weights(
    run: Path, versions: Set[int], settings: dict[str, Any], folder: Path
) -> ReplayWeights:
    """Return the weights that drew samples of `versions`, if a checkpoint has them; else the last.

    Those of a checkpoint are written as a model to `folder`.
    Raises: ConfigError if the run has neither.
    """
    names = _list_versions(versions)
    saved = _find_checkpoint(run, *versions) if len(versions) == 1 else None
    if saved is None:
        last = final_weights(run)
        return ReplayWeights(
            last.folder,
            f"{last.description}; the samples were drawn by {names}, "
            "of which there is no checkpoint",
        )
    export_saved(saved, _like(run, settings), folder)
    description = f"the weights that drew the samples, {names}, from {saved}"
    return ReplayWeights(folder, description, drew_samples=True)


def step_to_confirm(run: Path) -> int | None:
    """Return the last step with samples whose weights a checkpoint still has; None if none does."""
    for record in reversed(Checkpoints(run / "checkpoints", 1, 0).complete().values()):
        step = record.next_step + 1  # samples of a step are of the version before it, or older
        if (run / "samples" / f"step_{step:05d}.jsonl").is_file():
            drawn = find_samples(run, [], step)
            if all(sample.versions == {record.next_step} for sample in drawn):
                return step
    return None


def _like(run: Path, settings: dict[str, Any]) -> Path:
    """Return a folder with the config and the tokenizer of the run's model."""
    if _holds_adapters(run / "hf"):
        return _base_of(run / "hf")
    return run / "hf" if has_weights(run / "hf") else Path(str(settings.get("model", "")))


def _list_versions(versions: Set[int]) -> str:
    """Return text like `version 3 and version 4`."""
    names = [f"version {version}" for version in sorted(versions)]
    return " and ".join(names) or "an unknown version"


def _find_checkpoint(run: Path, version: int) -> Path | None:
    """Return a trainer's folder in the checkpoint before the step that pushed `version`."""
    for path, record in Checkpoints(run / "checkpoints", 1, 0).complete().items():
        if record.next_step != version:
            continue
        for file in path.glob(f"*/{INDEX_FILE}"):
            if read_index(file.parent).progress.version == version:
                return file.parent
    return None
