"""TensorBoard and Weights & Biases as sinks of metrics, without a network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError
from spmd_rl.observe import sinks
from spmd_rl.observe.sinks import Sinks
from tests.unit.observe.damaged import DAMAGED

ROWS: list[dict[str, Any]] = [
    {"step": 1, "unix_s": 1_700_000_000.5, "reward/mean": 0.25, "train/loss": None},
    {"step": 2, "unix_s": 1_700_000_001.5, "reward/mean": 0.5, "train/loss": -0.125},
]


@pytest.mark.parametrize("content", DAMAGED[:1] + DAMAGED[8:])
def test_a_damaged_id_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb/run_id").write_bytes(content)
    with pytest.raises(ConfigError, match=r"wandb.run_id holds no id"):
        sinks.WeightsAndBiases(tmp_path, {})


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    out = Sinks(["tensorboard"], tmp_path, {})
    for row in ROWS:
        out.write(row)
    out.close()
    [file] = (tmp_path / "tensorboard").iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(file)).Load()]
    values = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert values == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5), (2, "train/loss", -0.125)]
    assert [event.wall_time for event in events if event.summary.value] == [
        1_700_000_000.5,
        1_700_000_001.5,
    ]


OFFLINE = """
import sys
from pathlib import Path
from spmd_rl.observe.sinks import Sinks
rows = [{"step": 1, "reward/mean": 0.25, "train/loss": None}, {"step": 2, "reward/mean": 0.5}]
sinks = Sinks(["wandb"], Path(sys.argv[1]), {"run.seed": 7})
for row in rows:
    sinks.write(row)
sinks.close()
"""


def test_wandb_offline_keeps_the_metrics_in_the_run_folder(tmp_path: Path) -> None:
    """In a process of its own: wandb starts a service and sets up signals, exit hooks and warnings
    of all kinds.
    """
    settings = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_PROJECT": "test",
    }
    for _ in range(2):  # the second is a restart
        subprocess.run(
            [sys.executable, "-c", OFFLINE, str(tmp_path)],
            check=True,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(tmp_path),
                "PYTHONPATH": ":".join(sys.path),
                **settings,
            },
        )
    run_id = (tmp_path / "wandb" / "run_id").read_text()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    # the counter of W&B begins at 0 in each start: rows of one id would replace each other
    assert sorted(file.name for file in files) == [f"run-{run_id}-2.wandb", f"run-{run_id}.wandb"]
    assert all(run_id.encode() in file.read_bytes() for file in files)
    content = b"".join(file.read_bytes() for file in files)
    for said in (b"reward/mean", b"0.25", b"run.seed"):
        assert said in content
    assert b"train/loss" not in content


class Failing:
    """A sink whose server is gone."""

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.closed = False

    def write(self, row: Mapping[str, Any]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        self.closed = True


class Keeping:
    rows: ClassVar[list[Mapping[str, Any]]] = []

    def __init__(self, run: Path, config: Mapping[str, Any]) -> None:
        self.rows.clear()

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


def test_a_sink_that_fails_is_dropped_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "KINDS", {"failing": Failing, "keeping": Keeping})
    out = Sinks(["failing", "keeping"], tmp_path, {})
    with pytest.warns(UserWarning, match="failing gets no more metrics: no route"):
        out.write(ROWS[0])
    out.write(ROWS[1])  # warns no more: a warning would fail the test
    out.close()
    assert Keeping.rows == ROWS


def test_an_unknown_sink_and_a_missing_package_are_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="there is no sink 'tensorbord', only tensorboard and wandb"
    ):
        RunConfig(sinks=("tensorbord",))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    (tmp_path / "wandb").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"wandb is not installed: run pip install -e '.\[log\]' in spmd-rl's repository",
    ):
        RunConfig(sinks=("wandb",))


def test_without_sinks_nothing_is_imported() -> None:
    code = (
        "import sys, spmd_rl.observe.sinks; "
        "sys.exit(bool({'wandb', 'tensorboard', 'torch'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_sink_that_does_not_open_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "KINDS", {"closed": lambda run, config: 1 / 0})
    with pytest.raises(ConfigError, match=r"run\.sinks: closed cannot be opened: division by zero"):
        Sinks(["closed"], tmp_path, {})
