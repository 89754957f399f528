"""Weights & Biases, TensorBoard and metrics.jsonl have the same names and values of a run."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from spmd_rl.observe.metrics_log import read_metrics

Written = dict[int, dict[str, float]]  # by step and name
BLOCK_BYTES, HEADER_BYTES = 32768, 7

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from spmd_rl.evaluation.scores import metrics_of_sets
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.observe.sinks import Sinks
from spmd_rl.report.run_monitor import RunMonitor
folder = RunFolder.open(Path(sys.argv[1]), "", {})
sinks = Sinks(["tensorboard", "wandb"], folder.path, {})
monitor = RunMonitor(folder, sinks=sinks, tty=False)
monitor.begin_steps(2)
scores = [
    {"gsm": {"reward": 0.25, "reward_error": 0.125, "pass@1": 0.25, "pass@4": 0.75}},
    {"text": {"loss": 1.5, "perplexity": 4.5, "token_accuracy": 0.5}},
    {"pairs": {"accuracy": 0.75, "margin": -0.5}},
]
monitor.on_evaluation(0, metrics_of_sets(scores[0]), {})
monitor.on_step(1, {"train/loss": 0.5, "reward/mean": 0.25})
monitor.on_evaluation(1, metrics_of_sets(scores[1]), {})
monitor.on_step(2, {"train/loss": 0.25, "reward/mean": 0.5})
monitor.on_evaluation(2, metrics_of_sets(scores[2]), {})
monitor.close()
"""


def test_evaluations_have_the_same_names_everywhere(tmp_path: Path) -> None:
    """In a process of its own, as wandb starts a service and sets up exit hooks."""
    run = tmp_path / "run"
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    rows = read_metrics(run / "metrics.jsonl")
    logged = {row["step"]: numbers(row) for row in rows}
    assert set(logged[0]) == {
        "eval/reward",
        "eval/pass@1",
        "eval/gsm/reward",
        "eval/gsm/reward_error",
        "eval/gsm/pass@1",
        "eval/gsm/pass@4",
    }
    assert {"eval/loss", "eval/text/perplexity", "train/loss"} <= logged[1].keys()
    assert {"eval/accuracy", "eval/pairs/margin"} <= logged[2].keys()
    (events,) = (run / "tensorboard").iterdir()
    assert as_floats(from_tensorboard(events)) == as_floats(logged)
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    assert as_floats(from_wandb(file)) == as_floats(logged)


def numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in ("step", "unix_s")}


def as_floats(written: Written) -> Written:
    """Round to what an event file holds."""
    return {
        step: {name: struct.unpack("f", struct.pack("f", value))[0] for name, value in row.items()}
        for step, row in written.items()
    }


def from_tensorboard(file: Path) -> Written:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found: Written = {}
    for raw in RawEventFileLoader(str(file)).Load():
        event = Event.FromString(raw)
        for value in event.summary.value:
            found.setdefault(event.step, {})[value.tag] = value.simple_value
    return found


def from_wandb(file: Path) -> Written:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Written = {}
    for raw in records(file.read_bytes()):
        items = Record.FromString(raw).history.item
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
        if "step" in row:
            own = {name: value for name, value in row.items() if not name.startswith("_")}
            found.setdefault(own.pop("step"), {}).update(own)
    return found


def records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a W&B file, which has the format of LevelDB's log after 7 bytes."""
    position, record = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:  # the rest of a block is padding
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER_BYTES
        record += content[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""
