"""Run folders crafted by somebody else, with links to our files: no command writes through one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from spmd_rl.controller.lifecycle.roster import Roster
from spmd_rl.controller.lifecycle.snapshots import Snapshots
from spmd_rl.controller.lifecycle.stack_server import POINTER_FILE, StackServer
from spmd_rl.controller.run.command import main as rewind
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.microscope.command import main as mismatch
from spmd_rl.observe.command import main as trace
from spmd_rl.observe.metrics_log import MetricsLog, drop_steps_after
from spmd_rl.observe.run_folder import WRITTEN_BY_RUN, RunFolder
from spmd_rl.observe.run_lock import acquire_run_lock, refuse_running_run
from spmd_rl.observe.sinks import WeightsAndBiases
from spmd_rl.observe.trace import Trace
from spmd_rl.report.command import main as report
from spmd_rl.report.pictures.curves import draw

CONFIG = 'recipe = "grpo"\n'
HEADER = {"process": "rank 0", "rank": 0, "host": "h", "pid": 1, "began_unix_ns": 0}


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Return files that nothing may change, with the names that a run uses."""
    folder = tmp_path / "ours"
    for name in (
        "file",
        "step_00009.jsonl",
        "step_000009/state.json",
        "rank_0.txt",
        "later/file",
        "run_id",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"our {name}")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run of two steps, with two checkpoints and a trace."""
    folder = RunFolder.open(tmp_path / "run", CONFIG, {}).path
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "unix_s": 1.0}\n{"step": 2, "unix_s": 2.0}\n'
    )
    for step in (1, 2):
        checkpoint = folder / f"checkpoints/step_{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"next_step": step, "seed": 0}))
    (folder / "traces").mkdir()
    (folder / "traces/rank_0.jsonl").write_text(json.dumps(HEADER) + '\n["x", 0, 1, "lane", {}]\n')
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", MagicMock())


def digest(folder: Path) -> dict[str, str]:
    found = sorted(folder.rglob("*"))
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found if path.is_file()
    }


def attempt(act: Callable[[], object]) -> None:
    """Run the command, or check that it refuses with a sentence."""
    try:
        act()
    except (SpmdError, OSError):
        return


def replaced_by(link: Path, target: Path) -> None:
    """Replace whatever `link` is by a link to `target`."""
    if link.exists():
        link.rename(link.with_name(f"{link.name}.real"))
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def commands(run: Path) -> list[Callable[[], object]]:
    return [
        lambda: report([str(run)]),
        lambda: trace([str(run)]),
        lambda: rewind([str(run), "1"]),
        lambda: mismatch([str(run)]),
        lambda: refuse_running_run(run),
        lambda: RunFolder.open(run, CONFIG, {}).drop_samples(0),
    ]


def log(path: Path) -> None:
    with closing(MetricsLog(path)) as metrics:
        metrics.write(1, {"a": 1.0})


def parts_of_a_run(run: Path) -> list[Callable[[], object]]:
    """Return what a live run does in its folder, one by one."""
    rows = [{"step": 1, "reward/mean": 1.0}]
    private = run.parent / "private"
    private.mkdir()
    return [
        lambda: log(run / "metrics.jsonl"),
        lambda: drop_steps_after(run / "metrics.jsonl", 1),
        lambda: draw(rows, run / "curves.png", "title"),
        lambda: Snapshots(Roster(1, 20.0)).save(run / "stacks"),
        lambda: StackServer(private, run, str).close(),
        lambda: WeightsAndBiases(run, {}),
        lambda: os.close(acquire_run_lock(run, wait_s=0.0)),
    ]


@pytest.mark.parametrize(
    "name", sorted(WRITTEN_BY_RUN | {"checkpoints/later", "checkpoints/step_000002"})
)
@pytest.mark.parametrize("target", ["", "file", "missing"])
def test_no_command_leaves_the_folder(run: Path, ours: Path, name: str, target: str) -> None:
    before = digest(ours)
    replaced_by(run / name, ours / target)
    for command in commands(run):
        attempt(command)
    assert digest(ours) == before


@pytest.mark.parametrize("name", sorted(WRITTEN_BY_RUN))
def test_a_run_refuses_links_in_the_place_of_what_it_writes(
    run: Path, ours: Path, name: str
) -> None:
    replaced_by(run / name, ours)
    with pytest.raises(ConfigError, match=f"{name} is a symbolic link"):
        RunFolder.open(run, CONFIG, {})


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "curves.png",
        "stacks/rank_0.txt",
        "stacks/controller.txt",
        POINTER_FILE,
        "wandb/run_id",
    ],
)
@pytest.mark.parametrize("target", ["file", "missing"])
def test_no_part_of_a_run_leaves_the_folder(run: Path, ours: Path, name: str, target: str) -> None:
    """This holds even for a link that appears after the run began."""
    before = digest(ours)
    replaced_by(run / name, ours / target)
    for part in parts_of_a_run(run):
        attempt(part)
    assert digest(ours) == before


@pytest.mark.parametrize(
    "file", ["report.html", "trace.json", "metrics", "metrics.jsonl", "curves.png", "config.toml"]
)
def test_no_name_of_an_unfinished_file_is_taken(run: Path, ours: Path, file: str) -> None:
    before = digest(ours)
    (run / f"{file}.part").symlink_to(ours / "file")
    for act in [*commands(run), *parts_of_a_run(run)]:
        attempt(act)
    assert digest(ours) == before


def test_spans_are_not_written_through_a_link(run: Path, ours: Path) -> None:
    before = digest(ours)
    replaced_by(run / "traces/rank_0.jsonl", ours / "file")
    spans = Trace(run / "traces", "rank 0", rank=0)
    with spans.span("x"):
        pass
    with pytest.warns(UserWarning, match="tracing stops here"):
        spans.close()
    assert digest(ours) == before


def test_a_run_that_is_a_link_itself_goes_on(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert RunFolder.open(tmp_path / "link", CONFIG, {}).path == tmp_path / "link"
