"""The folder of a run.

    config.toml    the config as given       metrics.jsonl   one line a step
    plan.json      the config as resolved    samples/        step_00001.jsonl ...
    contract.json  numeric contracts         logs/ stacks/   of the workers
    run.json       command, machine          curves.png

Checkpoints are in checkpoints/, the exported model is in hf/.
"""

from __future__ import annotations

import json
import os
import tomllib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.metrics_log import has_steps
from spmd_rl.observe.run_lock import CONTROLLER_LOCK, LAUNCHER_LOCK, acquire_run_lock
from spmd_rl.observe.samples_file import samples_as_json_lines
from spmd_rl.types.groups import Group

MAX_CHANGES = 4  # of the settings that an error names
# what every start makes at once, so that it is no sign of progress
MADE_AT_START = {
    "config.toml",
    "plan.json",
    "run.json",
    "contract.json",
    "logs",
    "stacks",
    "traces",
    "tensorboard",
    "wandb",
    "curves.png",
    "report.html",
}
WRITTEN_BY_RUN = MADE_AT_START | {
    "metrics.jsonl",
    "samples",
    "eval.json",
    "checkpoints",
    "hf",
    "mismatch",
    "sft.jsonl",
    "trace.json",
    "controller.json",
    CONTROLLER_LOCK,
    LAUNCHER_LOCK,
}
# a resumed run may change these: how long it waits, what it keeps, where it reports
CHANGEABLE_SETTINGS = {
    "run.resume",
    "run.name",
    "run.folder",
    "run.save_every",
    "run.save_last",
    "run.keep_checkpoints",
    "run.keep_best",
    "run.best",
    "run.patience",
    "run.verify_every",
    "run.self_check",
    "run.deadline_s",
    "run.between_calls_s",
    "run.lost_after_s",
    "run.start_s",
    "run.grace_s",
    "run.sinks",
    "run.trace",
}


class RunFolder:
    """Paths of one run's files, and the writing of those that are written whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples"
        self.curves = path / "curves.png"
        self.checkpoints = path / "checkpoints"
        self.hf = path / "hf"
        self.logs = path / "logs"
        self.stacks = path / "stacks"

    @classmethod
    def open(
        cls, path: str | Path, config: str, plan: Mapping[str, Any], *, resume: bool = False
    ) -> RunFolder:
        """Make the folder, or continue in one that holds the same run or a run without a step.

        Only this user can read a new folder. No other process can open it while this object lives.
        `config` is the TOML of the run, and `plan` is what it resolved to. A run is the same if its
        settings are, except for `CHANGEABLE_SETTINGS` and more steps; `resume` accepts any change.
        Raises: ConfigError when the folder cannot be made, holds something else, or belongs to a
        live run. The folder is left as it was then.
        """
        run = cls(Path(path))
        run.check_reusable(config, resume)
        run.make()
        weakref.finalize(run, os.close, acquire_run_lock(run.path))
        run.check_reusable(config, resume)  # again: another run may have started meanwhile
        run._write_start(config, plan)
        return run

    def make(self) -> None:
        """Make the folder itself. Raises: ConfigError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}") from None

    def _write_start(self, config: str, plan: Mapping[str, Any]) -> None:
        """Write what a start knows, and drop the numeric contract of a start without results."""
        if not self._has_results():
            (self.path / "contract.json").unlink(missing_ok=True)
        # first, because this file marks the folder of a run
        write_atomically(self.path / "config.toml", config)
        for folder in (self.samples, self.logs, self.stacks):
            folder.mkdir(exist_ok=True)
        write_atomically(self.path / "plan.json", json.dumps(plan, indent=2) + "\n")

    def write_samples(self, step: int, groups: Sequence[Group], prefix: str = "") -> None:
        """Write the samples of a step, one line a sample. `prefix` begins the file's name."""
        path = self.samples / f"{prefix}step_{step:05d}.jsonl"
        write_atomically(path, samples_as_json_lines(groups))

    def drop_samples(self, after: int) -> None:
        """Remove the samples of later steps, which a resumed run writes again."""
        for path in self.samples.glob("*step_*"):
            number = path.name.rpartition("step_")[2].partition(".")[0]
            if number.isdecimal() and int(number) > after:
                path.unlink()

    def check_reusable(self, config: str, resume: bool) -> None:
        """Raises: ConfigError unless a run of this config may start, or go on, in the folder.

        It must be absent, empty, or the folder of a run whose settings are the same or that is to
        be resumed. No file that a run writes may be a symbolic link.
        """
        refuse_links(self.path)
        if not self.path.exists():
            return
        if self.path.is_dir() and all(map(_may_precede_run, self.path.iterdir())):
            return
        config_file = self.path / "config.toml"
        if not config_file.is_file():
            raise ConfigError(
                f"{self.path} exists and is not the folder of a run: add {self._free_name()}"
            )
        if resume or not self._has_results():
            return
        try:
            old = tomllib.loads(config_file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # it may be torn
            raise ConfigError(f"{config_file} is not valid TOML: {error}") from error
        changes = list(_changes(old, tomllib.loads(config)))
        if changes:
            more = f", and {len(changes) - MAX_CHANGES} more" if changes[MAX_CHANGES:] else ""
            raise ConfigError(
                f"{self.path} holds a run with another configuration "
                f"({', '.join(changes[:MAX_CHANGES])}{more}): add "
                f"{self._free_name()} for a new run, or --run.resume=true to go on in this one"
            )

    def _free_name(self) -> str:
        """Return the flag that starts a new run: this run's name with the next free number."""
        for number in count(2):
            name = f"{self.path.name}-{number}"
            if not self.path.with_name(name).exists():
                break
        return f"--run.name={name}"

    def _has_results(self) -> bool:
        """Whether there is a step, a checkpoint, a model, or a file of the user."""
        results = (self.samples, self.checkpoints, self.hf)
        if has_steps(self.metrics) or any(map(has_content, results)):
            return True
        return any(self._is_users_file(path) for path in self.path.iterdir())

    def _is_users_file(self, path: Path) -> bool:
        written = path.name in MADE_AT_START or path in (
            self.samples,
            self.checkpoints,
            self.hf,
            self.metrics,
        )
        return not written and not _may_precede_run(path)


def has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _may_precede_run(path: Path) -> bool:
    """Whether this may be in the folder before its run starts.

    Such are half-written files, the locks, and the logs that a batch system opens.
    """
    return path.suffix == ".part" or path.name in ("logs", CONTROLLER_LOCK, LAUNCHER_LOCK)


def refuse_links(run: Path) -> None:
    """Raises: ConfigError when a file or folder that a run writes is a symbolic link.

    The run would write through it, to files elsewhere.
    """
    for path in (
        *(run / name for name in sorted(WRITTEN_BY_RUN)),
        *(run / "checkpoints").glob("*"),
    ):
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, through which the run could overwrite other files: "
                "replace it by its target, or make the run's folder itself the link"
            )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a clause for each setting that changed and that a run may not change."""
    for key in [*old, *(k for k in new if k not in old)]:
        old_value, new_value = old.get(key), new.get(key)
        if isinstance(old_value, dict) and isinstance(new_value, dict):
            yield from _changes(old_value, new_value, f"{prefix}{key}.")
        elif old_value != new_value and not _may_change(prefix + key, old_value, new_value):
            yield f"{prefix}{key} was {old_value!r}, is {new_value!r}"


def _may_change(key: str, old: Any, new: Any) -> bool:
    """Whether a run may go on with this change of a setting."""
    if key in CHANGEABLE_SETTINGS:
        return True
    is_longer = isinstance(old, int | float) and isinstance(new, int | float) and new > old
    # with 0 epochs the steps count, which may be more than those of any epochs
    return is_longer and (key == "steps" or (key == "epochs" and old > 0))
