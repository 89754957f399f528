"""Sinks of metrics beside `metrics.jsonl`: TensorBoard and Weights & Biases, on request.

Both come with `pip install -e '.[log]'` and are imported when opened. W&B reads its own environment
variables, such as WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE=offline.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically

_RUN_ID = re.compile(r"[\w-]{1,128}", re.ASCII)


class Sink(Protocol):
    """A receiver of each step's metrics."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Send a row of `MetricsLog.write`: `step`, `unix_s` and the metrics.

        A metric that is not finite is None.
        """

    def close(self) -> None: ...


class TensorBoard:
    """An event file in `tensorboard/` of the run folder.

    TensorBoard's own writer needs neither torch nor TensorFlow.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(run / "tensorboard"))

    def write(self, row: Mapping[str, Any]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value)
            for name, value in _numbers(row).items()
        ]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(
            self._event.Event(
                wall_time=row.get("unix_s") or time.time(), step=row["step"], summary=summary
            )
        )

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run a run folder, also across restarts: `wandb/run_id` keeps its id.

    The step is logged as a metric, because W&B's own counter cannot go back when a restart resumes
    from an earlier step. Offline no server knows that counter: it would begin again, and rows of
    one id would replace each other. So each start has a W&B run of its own there, and the id of the
    first as its group.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        (run / "wandb").mkdir(parents=True, exist_ok=True)
        id_file = run / "wandb" / "run_id"
        if not id_file.exists():
            write_atomically(id_file, uuid.uuid4().hex)
        run_id = id_file.read_bytes().decode(errors="replace").strip()
        if not _RUN_ID.fullmatch(run_id):
            raise ConfigError(f"{id_file} holds no id of a W&B run: remove it to begin a new one")
        offline = wandb.setup().settings.mode in ("offline", "dryrun")
        starts_before = len([*(run / "wandb").glob("*run-*")])
        # W&B must not write to the terminal, where the run shows its own progress
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            id=f"{run_id}-{starts_before + 1}" if offline and starts_before else run_id,
            name=run.name,
            group=run_id if offline else None,
            dir=str(run),
            config=dict(config),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        if self._run.url:
            print(f"W&B: {self._run.url}", flush=True)

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({"step": row["step"]} | _numbers(row))

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check_sinks(kinds: Sequence[str]) -> None:
    """Raises: ConfigError for an unknown kind or a missing package."""
    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(f"run.sinks: there is no sink '{kind}', only {' and '.join(KINDS)}")
        found = importlib.util.find_spec(kind)
        # a mere folder of that name, such as W&B's output, has no origin
        if found is None or found.origin is None:
            raise ConfigError(
                f"run.sinks: {kind} is not installed: run pip install -e '.[log]' in spmd-rl's "
                "repository"
            )


class Sinks:
    """All sinks of a run. A sink that fails is dropped with a warning, and the run goes on."""

    def __init__(self, kinds: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        """Open the sinks of these kinds, which `check_sinks` has accepted.

        `config` is shown by sinks that can. Raises: ConfigError when a sink does not open.
        """
        self._open: dict[str, Sink] = {}
        for kind in kinds:
            try:
                self._open[kind] = KINDS[kind](run, config)
            # other packages may raise anything, such as for a missing login
            except Exception as error:
                raise ConfigError(f"run.sinks: {kind} cannot be opened: {error}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        self._for_each(lambda sink: sink.write(row))

    def close(self) -> None:
        self._for_each(lambda sink: sink.close())
        self._open = {}

    def _for_each(self, action: Callable[[Sink], None]) -> None:
        for kind, sink in list(self._open.items()):
            try:
                action(sink)
            except Exception as error:  # noqa: BLE001  a failing sink must not end the run
                del self._open[kind]
                warnings.warn(f"{kind} gets no more metrics: {error}", stacklevel=3)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name not in ("step", "unix_s") and value is not None
    }
