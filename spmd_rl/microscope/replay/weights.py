"""Which weights a replay is under: a model's, those that a run ended with, or those that drew its
samples.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.controller.run.checkpoints import Checkpoints
from spmd_rl.errors import ConfigError
from spmd_rl.model.weight_files import has_weights
from spmd_rl.train.checkpoint_index import INDEX_FILE, read_index
from spmd_rl.train.export import export_saved


@dataclass(frozen=True)
class Weights:
    """`says` what they are; `drew` that they drew the samples."""

    folder: Path
    says: str
    drew: bool = False


def of_run(run: Path) -> Weights:
    """Raises: ConfigError when the run exported no weights."""
    if not has_weights(run / "hf"):
        raise ConfigError(
            f"{run} has no weights to replay: {run / 'hf'} holds none, so name a model with --model"
        )
    return Weights(run / "hf", f"the weights in {run / 'hf'}, with which the run ended")


def of_version(run: Path, versions: Set[int], settings: dict[str, Any], folder: Path) -> Weights:
    """Those that drew samples of `versions`, written as a model to `folder`, if a checkpoint has
    them; else the last.

    Raises: ConfigError when the run has neither.
    """
    named = " and ".join(f"version {one}" for one in sorted(versions)) or "an unknown version"
    saved = _saved(run, *versions) if len(versions) == 1 else None
    if saved is None:
        last = of_run(run)
        return Weights(
            last.folder,
            f"{last.says}; the samples were drawn by {named}, of which there is no checkpoint",
        )
    like = run / "hf" if has_weights(run / "hf") else Path(str(settings.get("model", "")))
    export_saved(saved, like, folder)
    return Weights(folder, f"the weights that drew the samples, {named}, from {saved}", drew=True)


def _saved(run: Path, version: int) -> Path | None:
    """A trainer's folder in the checkpoint before the step that pushed `version`."""
    for path, record in Checkpoints(run / "checkpoints", 1, 0).complete().items():
        for file in path.glob(f"*/{INDEX_FILE}") if record.next_step == version else ():
            if read_index(file.parent).progress.version == version:
                return file.parent
    return None
