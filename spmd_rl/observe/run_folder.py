"""The folder a run leaves behind.

    config.toml    as given             metrics.jsonl   a line a step
    plan.json      as resolved          samples/        step_00001.jsonl ...
    contract.json  of roles and links   logs/ stacks/   of the workers
    run.json       command, machine     curves.png

Checkpoints and the exported model stand beside them, in checkpoints/ and hf/.
"""

from __future__ import annotations

import json
import os
import tomllib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically
from spmd_rl.observe.metrics_log import has_steps
from spmd_rl.observe.run_lock import CONTROLLER_LOCK, LAUNCHER_LOCK, acquire_run_lock
from spmd_rl.types.columns import split_at
from spmd_rl.types.samples import Group

_encode_lines = msgspec.json.Encoder().encode_lines

MADE_AT_START = {
    *(
        "config.toml",
        "plan.json",
        "run.json",
        "contract.json",
        "logs",
        "stacks",
        "traces",
        "tensorboard",
        "wandb",
    ),
    *("curves.png", "report.html"),
}
WRITTEN_BY_RUN = MADE_AT_START | {
    *("metrics.jsonl", "samples", "checkpoints", "hf", "mismatch", "trace.json"),
    *("controller.json", CONTROLLER_LOCK, LAUNCHER_LOCK),
}
CHANGEABLE_SETTINGS = {
    *(
        "run.resume",
        "run.name",
        "run.folder",
        "run.save_every",
        "run.keep_checkpoints",
        "run.keep_best",
    ),
    *("run.deadline_s", "run.between_calls_s", "run.lost_after_s", "run.start_s", "run.grace_s"),
    *("run.sinks", "run.trace"),
}  # settings that no step of a run depends on: how long it waits, what it keeps, who is told


class RunFolder:
    """Paths of one run's files. Whole files appear at once: what is there under its name is
    complete.
    """

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
        """Make the folder, or continue in one that holds a run of the same configuration, or one
        without a step.

        A new folder is this user's alone. `CHANGEABLE_SETTINGS` is no part of a configuration. No other
        process can open it while this object lives. `config` is the TOML of the run, `plan` what it
        resolved to. `resume` accepts a changed configuration.
        Raises: ConfigError when the folder holds something else, which is not touched then, or a
        live run, or cannot be made.
        """
        run = cls(Path(path))
        run.check_reusable(config, resume)
        run.make()
        weakref.finalize(run, os.close, acquire_run_lock(run.path))
        run.check_reusable(config, resume)  # again: another may have begun meanwhile
        if not run._holds_work():
            (run.path / "contract.json").unlink(missing_ok=True)
        # first: it is what makes this the folder of a run
        write_atomically(run.path / "config.toml", config)
        for folder in (run.samples, run.logs, run.stacks):
            folder.mkdir(exist_ok=True)
        write_atomically(run.path / "plan.json", json.dumps(plan, indent=2) + "\n")
        return run

    def make(self) -> None:
        """Make the folder itself. Raises: ConfigError."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}") from None

    def write_samples(self, step: int, groups: Sequence[Group]) -> None:
        """One line a sample: what was asked, answered and rewarded, with tokens, log-probs and
        versions.
        """
        write_atomically(self.samples / f"step_{step:05d}.jsonl", _json_lines(_sample_rows(groups)))

    def drop_samples(self, after: int) -> None:
        """Remove the samples of the steps after `after`, which a resumed run will write again."""
        for path in self.samples.glob("step_*"):
            number = path.name.removeprefix("step_").partition(".")[0]
            if number.isdecimal() and int(number) > after:
                path.unlink()

    def check_reusable(self, config: str, resume: bool) -> None:
        """Raises: ConfigError when what is there is no run, one of another configuration and not to
        be resumed, or one with a symbolic link in the place of what it writes.
        """
        refuse_links(self.path)
        if not self.path.exists() or (
            self.path.is_dir() and all(_before_a_run(f) for f in self.path.iterdir())
        ):
            return
        held = self.path / "config.toml"
        if not held.is_file():
            raise ConfigError(
                f"{self.path} exists and is not the folder of a run: add {self._free_name()}"
            )
        if self._holds_work() and not resume:
            changed = list(
                _changes(tomllib.loads(held.read_text(encoding="utf-8")), tomllib.loads(config))
            )
            if changed:
                raise ConfigError(
                    f"{self.path} holds a run with another configuration ({changed[0]}): "
                    f"add {self._free_name()} for a new run, or --run.resume=true to go on in this one"
                )

    def _free_name(self) -> str:
        """The flag that starts a run of the same name with a number that no folder here has."""
        names = (f"{self.path.name}-{number}" for number in count(2))
        return (
            f"--run.name={next(name for name in names if not self.path.with_name(name).exists())}"
        )

    def _holds_work(self) -> bool:
        """Whether there is more than what every start makes at once: a step, a checkpoint, a model,
        a user's file.
        """
        made = (self.samples, self.checkpoints, self.hf)
        known = (*made, self.metrics)
        return (
            has_steps(self.metrics)
            or any(map(has_content, made))
            or any(
                path.name not in MADE_AT_START and path not in known and not _before_a_run(path)
                for path in self.path.iterdir()
            )
        )


def has_content(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _before_a_run(path: Path) -> bool:
    """What may lie in the folder before its run: half-written files, its locks, the logs that a
    batch system opens.
    """
    return path.suffix == ".part" or path.name in ("logs", CONTROLLER_LOCK, LAUNCHER_LOCK)


def refuse_links(run: Path) -> None:
    """Raises: ConfigError when what a run writes to is a symbolic link, through which it would
    write elsewhere.
    """
    for path in (
        *(run / name for name in sorted(WRITTEN_BY_RUN)),
        *(run / "checkpoints").glob("*"),
    ):
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, through which files elsewhere could be lost: "
                "put what it names in its place, or let the run's folder itself be the link"
            )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in [*old, *(k for k in new if k not in old)]:
        before, now = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _changes(before, now, f"{prefix}{key}.")
        elif before != now and prefix + key not in CHANGEABLE_SETTINGS:
            yield f"{prefix}{key} was {before!r}, is {now!r}"


class _SampleRow(msgspec.Struct, omit_defaults=True):
    """A line of the samples."""

    prompt_uid: int
    index: int
    prompt: str
    answer: str
    text: str
    reward: float
    finish: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    parts: dict[str, float] = {}


def _json_lines(rows: list[_SampleRow]) -> str:
    """As `json.dumps` has them: msgspec is ten times as fast, but knows no NaN, and no half of a
    surrogate pair.
    """
    try:
        lines = _encode_lines(rows)
    except UnicodeEncodeError:
        lines = b"null"
    if b"null" not in lines:
        return lines.decode()
    if len(rows) > 1:
        return "".join(_json_lines([row]) for row in rows)
    return json.dumps(msgspec.to_builtins(rows[0])) + "\n"


def _sample_rows(groups: Sequence[Group]) -> list[_SampleRow]:
    columns = Group.to_columns(groups)
    samples, prompts, sizes = columns.samples, columns.prompts, columns.lengths.tolist()
    which = (np.repeat(prompts.uid, sizes).tolist(), samples.index.tolist())
    asked = [[*chain(*map(repeat, column, sizes))] for column in (prompts.text, prompts.answer)]
    answered = (samples.text, samples.reward.tolist(), samples.finish)
    arrays = (samples.tokens, samples.logprobs, samples.versions)
    per_token = [split_at(array.tolist(), samples.offsets) for array in arrays]
    return list(map(_SampleRow, *which, *asked, *answered, *per_token, samples.parts))
