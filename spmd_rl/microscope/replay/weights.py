"""Weights of a replay: a model's, those that a run ended with, or those that drew its samples."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.errors import ConfigError
from spmd_rl.microscope.replay.inputs import find_samples
from spmd_rl.model.weight_files import has_weights
from spmd_rl.train.checkpoint.checkpoint_index import INDEX_FILE, read_index
from spmd_rl.train.checkpoint.export import export_saved


@dataclass(frozen=True)
class ReplayWeights:
    """A folder with weights. `drew_samples` is set if the samples were drawn by these weights."""

    folder: Path
    description: str
    drew_samples: bool = False


def final_weights(run: Path) -> ReplayWeights:
    """Return the weights that the run ended with.

    Raises: ConfigError if the run exported no weights.
    """
    if not has_weights(run / "hf"):
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
    like = run / "hf" if has_weights(run / "hf") else Path(str(settings.get("model", "")))
    export_saved(saved, like, folder)
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
