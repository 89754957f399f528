"""Where metrics go beside `metrics.jsonl`: TensorBoard and Weights & Biases, each only if a run
asks for it.

Both come with `pip install -e '.[log]'` and are imported when opened. W&B is set up by its own
variables: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline and the rest.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmd_rl.errors import ConfigError
from spmd_rl.observe.atomic_write import write_atomically


class Sink(Protocol):
    """Somewhere that a step's metrics are sent to."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Take a row as `MetricsLog.write` returns it: `step`, `unix_s` and the metrics, None where
        not finite.
        """

    def close(self) -> None: ...


class TensorBoard:
    """An event file in `tensorboard/` of the run folder, in TensorBoard's own writer: no torch, no
    TensorFlow.
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
    """One W&B run for one run folder, restarts included: the folder's `wandb/run_id` says which.

    Steps are a metric of their own there, because W&B's own counter does not go back to where a
    restart resumes.
    """

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        (run / "wandb").mkdir(parents=True, exist_ok=True)
        name = run / "wandb" / "run_id"
        if not name.exists():
            write_atomically(name, uuid.uuid4().hex)
        run_id = name.read_text(encoding="utf-8").strip()
        # the terminal, and the last line there, are the run's
        settings = wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            id=run_id,
            name=run.name,
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
            raise ConfigError(f"no sink called '{kind}': there are {' and '.join(KINDS)}")
        found = importlib.util.find_spec(kind)
        # a folder of that name, as W&B leaves one, has no origin
        if found is None or found.origin is None:
            raise ConfigError(
                f"{kind} is not installed: pip install -e '.[log]' in spmd-rl's repository"
            )


class Sinks:
    """All sinks of a run as one. A sink that fails is dropped with a warning, and the run goes on."""

    def __init__(self, kinds: Sequence[str], run: Path, config: Mapping[str, Any]) -> None:
        """`kinds` are checked ones; `config` is shown where a sink can. Raises: ConfigError when
        one does not open.
        """
        self._open: dict[str, Sink] = {}
        for kind in kinds:
            try:
                self._open[kind] = KINDS[kind](run, config)
            # whatever a package of others raises, such as for a missing login
            except Exception as error:
                raise ConfigError(f"run.sinks: {kind} does not open: {error}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        self._each(lambda sink: sink.write(row))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._open = {}

    def _each(self, act: Callable[[Sink], None]) -> None:
        for kind, sink in list(self._open.items()):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001  a server, disk or package of others must not end a training run
                del self._open[kind]
                warnings.warn(f"{kind} gets no more metrics: {error}", stacklevel=3)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in row.items()
        if name not in ("step", "unix_s") and value is not None
    }
