"""The run folder: made once, never overwritten, every file written atomically."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.observe.metrics import METRIC_OF_NAME, METRICS
from spmd_rl.observe.metrics_log import MetricsLog, drop_steps_after, read_metrics
from spmd_rl.observe.run_folder import CHANGEABLE_SETTINGS, RunFolder
from spmd_rl.observe.run_lock import (
    ACQUIRE_S,
    CONTROLLER_LOCK,
    LAUNCHER_LOCK,
    acquire_run_lock,
    launcher_lock,
    refuse_running_run,
)
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.observe.damaged import DAMAGED

CONFIG = "steps = 3\n[trainer]\nlr = 0.1\n"


def group() -> Group:
    tokens = np.array([4, 5], np.int32)
    logprobs = np.array([-0.1, -1e-7], np.float32)
    sample = Sample(
        0, 0, tokens, logprobs, np.zeros(2, np.int32), "completed", text="85", reward=1.0
    )
    return Group(Prompt(0, np.array([1], np.int32), "37+48=", "85"), [sample])


def test_a_new_folder(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "runs" / "demo", CONFIG, {"world": 2})
    assert (run.path / "config.toml").read_text() == CONFIG
    assert json.loads((run.path / "plan.json").read_text()) == {"world": 2}
    assert all(folder.is_dir() for folder in (run.samples, run.logs, run.stacks))
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_who_may_read_a_folder_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(0o750)
    assert RunFolder.open(tmp_path / "r", CONFIG, {}).path.stat().st_mode & 0o777 == 0o750


def test_the_same_configuration_continues(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "r", CONFIG, {}).metrics.write_text("kept\n")
    assert RunFolder.open(tmp_path / "r", CONFIG, {}).metrics.read_text() == "kept\n"


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    """A lock belongs to an open file, so two in one process are as good as two processes."""
    held = acquire_run_lock(tmp_path)
    with pytest.raises(
        ConfigError, match=rf"another run is going on in .* \(host \S+, pid {os.getpid()}\)"
    ):
        acquire_run_lock(tmp_path, wait_s=0.0)
    os.close(held)
    os.close(acquire_run_lock(tmp_path, wait_s=0.0))


def test_a_live_run_of_this_host_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller is a child of its rank 0 still. One that is ending, or an older lock, is
    waited for.
    """
    refuse_running_run(tmp_path)
    held = acquire_run_lock(tmp_path)
    for refused in (refuse_running_run, acquire_run_lock):
        with monkeypatch.context() as patch:
            patch.setattr("spmd_rl.observe.run_lock.POLL_S", "nobody waits")
            with pytest.raises(
                ConfigError, match=rf"is going on in .* \(host \S+, pid {os.getpid()}\): end"
            ):
                refused(tmp_path)
    lock = tmp_path / CONTROLLER_LOCK
    for ending in (lock.read_text().replace(str(os.getppid()), "1234567"), "host h, pid 12\n", ""):
        lock.write_text(ending)
        refuse_running_run(tmp_path)
        began = time.monotonic()
        with pytest.raises(ConfigError, match="another run is going on in"):
            acquire_run_lock(tmp_path, wait_s=0.3)
        assert time.monotonic() - began >= 0.3
    os.close(held)
    refuse_running_run(tmp_path)


@pytest.mark.parametrize(
    "line", [b"{", b"[]", b'{"step": null}', b"\0", b'{"step": 1e999}', b"\xff", b"[" * 100_000]
)
def test_a_damaged_line_of_metrics_is_skipped_and_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2: not .*; this line is skipped"):
        assert [row["step"] for row in read_metrics(path)] == [1, 3]
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2: not "):
        drop_steps_after(path, 3)
    # where a run goes on, the damage is gone
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_numbers_that_no_float_can_hold_are_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1e999, "b": NaN, "c": 1%s, "d": 0.5}\n' % ("0" * 400)
    )
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 0.5}
    ]


def test_a_warm_up_alone_keeps_no_other_configuration_out(tmp_path: Path) -> None:
    metrics = RunFolder.open(tmp_path / "r", CONFIG, {}).metrics
    other = CONFIG.replace("0.1", "0.2")
    metrics.write_text('{"step": -1, "warmup/loss": 1.0}\n{"step": 0, "warmup/loss": 0.5}\n')
    RunFolder(tmp_path / "r").check_reusable(other, resume=False)
    for more in ('{"step": 1}\n', "damaged\n"):
        metrics.write_text('{"step": 0}\n' + more)
        with pytest.raises(ConfigError, match="another configuration"):
            RunFolder(tmp_path / "r").check_reusable(other, resume=False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_launchers_at_once_are_refused_at_once_and_their_ranks_hold_no_lock(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    ours, theirs = socket.socketpair()
    with launcher_lock(tmp_path):
        if not (rank := os.fork()):
            ours.close()
            theirs.send(b"!")
            theirs.recv(1)
            os._exit(0)
        ours.recv(1)
        with pytest.raises(ConfigError, match=rf"another run is going on in .*pid {os.getpid()}\)"):
            launcher_lock(tmp_path).__enter__()
    assert time.monotonic() - began < ACQUIRE_S / 3
    os.close(acquire_run_lock(tmp_path, 0.0, LAUNCHER_LOCK))  # although the rank lives on
    for end in (ours, theirs):
        end.close()
    os.waitpid(rank, 0)
    RunFolder.open(tmp_path, CONFIG, {})


def test_a_lock_alone_is_no_run(tmp_path: Path) -> None:
    os.close(acquire_run_lock(tmp_path))
    RunFolder.open(tmp_path, CONFIG, {})


@pytest.mark.parametrize("content", [one for one in DAMAGED if one not in (b"", b"[]")])
def test_a_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    run = RunFolder.open(tmp_path / "r", CONFIG, {}).path
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / "config.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config.toml is not valid TOML"):
        RunFolder.open(run, CONFIG, {})


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "checkpoints/step_00001", "hf/model.safetensors", "scores.json"]
)
def test_another_configuration_is_refused_and_nothing_is_touched(tmp_path: Path, left: str) -> None:
    file = RunFolder.open(tmp_path / "r", CONFIG, {"world": 2}).path / left
    file.parent.mkdir(exist_ok=True)
    file.write_text('{"step": 1}\n')
    with pytest.raises(
        ConfigError, match=r"another configuration \(trainer\.lr was 0\.1, is 0\.2\)"
    ):
        RunFolder.open(tmp_path / "r", CONFIG.replace("0.1", "0.2"), {"world": 4})
    assert (tmp_path / "r" / "config.toml").read_text() == CONFIG
    assert json.loads((tmp_path / "r" / "plan.json").read_text()) == {"world": 2}
    RunFolder.open(tmp_path / "r", CONFIG.replace("0.1", "0.2"), {}, resume=True)


@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ("steps = 2", "steps = 3", True),
        ("steps = 3", "steps = 2", False),
        ("epochs = 1.0", "epochs = 1.5", True),
        ("epochs = 2.0", "epochs = 1.0", False),
        ("epochs = 0.0", "epochs = 1.0", False),  # whose steps are others
        ("steps = 0", "steps = 3", True),
        ("steps = 2\n[trainer]\nsteps = 1", "steps = 3\n[trainer]\nsteps = 2", False),
    ],
)
def test_a_run_may_become_longer(tmp_path: Path, before: str, after: str, goes_on: bool) -> None:
    RunFolder.open(tmp_path / "r", before + "\n", {}).metrics.write_text('{"step": 1}\n')
    if goes_on:
        RunFolder.open(tmp_path / "r", after + "\n", {})
        return
    with pytest.raises(ConfigError, match="another configuration"):
        RunFolder.open(tmp_path / "r", after + "\n", {})


def test_how_a_run_is_kept_and_watched_is_no_configuration_of_it(tmp_path: Path) -> None:
    given = (
        "steps = 2\n\n[run]\nseed = 1\nresume = true\nsave_every = 3\n"
        'sinks = ["wandb"]\ndeadline_s = 9.0\n'
    )
    again = "steps = 2\n\n[run]\nseed = 1\nresume = false\nsave_every = 5\nsinks = []\n"
    RunFolder.open(tmp_path / "r", given, {}).metrics.write_text("kept\n")
    assert RunFolder.open(tmp_path / "r", again, {}).metrics.read_text() == "kept\n"
    with pytest.raises(ConfigError, match=r"another configuration \(run\.seed was 1, is 2\)"):
        RunFolder.open(tmp_path / "r", again.replace("seed = 1", "seed = 2"), {})
    assert {name.removeprefix("run.") for name in CHANGEABLE_SETTINGS} <= {
        field.name for field in fields(RunConfig)
    }


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/r cannot be made: Not a directory"):
        RunFolder.open(tmp_path / "file" / "r", CONFIG, {})


def test_a_start_that_made_no_step_is_replaced(tmp_path: Path) -> None:
    failed = RunFolder.open(tmp_path / "r", CONFIG, {"world": 2})
    failed.metrics.touch()
    (failed.path / "contract.json").write_text("{}")
    other = CONFIG.replace("0.1", "0.2")
    del failed
    run = RunFolder.open(tmp_path / "r", other, {"world": 4})
    assert (run.path / "config.toml").read_text() == other
    assert json.loads((run.path / "plan.json").read_text()) == {"world": 4}
    assert not (run.path / "contract.json").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        RunFolder.open(tmp_path, CONFIG, {}, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_samples_keep_every_bit(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "r", CONFIG, {})
    run.write_samples(1, [group()])
    (row,) = [
        json.loads(line) for line in (run.samples / "step_00001.jsonl").read_text().splitlines()
    ]
    assert (row["prompt"], row["answer"], row["text"], row["reward"]) == ("37+48=", "85", "85", 1.0)
    assert np.array(row["logprobs"], np.float32).tobytes() == group().samples[0].logprobs.tobytes()


def test_any_text_and_any_reward_is_written(tmp_path: Path) -> None:
    run = RunFolder.open(tmp_path / "r", CONFIG, {})
    [good] = group().samples
    texts = ["\ud83d", "null", "é\u2028\x00", "a\nb"]
    samples = [
        replace(good, text=text, reward=reward) for text in texts for reward in (float("nan"), -0.1)
    ]
    run.write_samples(1, [replace(group(), samples=samples)])
    rows = [
        json.loads(line)
        for line in (run.samples / "step_00001.jsonl").read_text("utf-8").split("\n")[:-1]
    ]
    assert [row["text"] for row in rows] == [sample.text for sample in samples]
    assert str([row["reward"] for row in rows]) == str([sample.reward for sample in samples])


def test_a_line_a_step_is_there_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    row = log.write(1, {"reward/mean": 0.5, "onpolicy/mismatched_tokens": 0.0})
    assert read_metrics(log.path) == [row]
    assert (row["step"], row["reward/mean"], row["onpolicy/mismatched_tokens"]) == (1, 0.5, 0)
    log.close()


def test_nan_is_written_as_null_and_warned_of(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.warns(UserWarning, match="step 3: not finite, so written as null: train/loss"):
        log.write(3, {"train/loss": float("nan"), "reward/mean": 1.0})
    assert read_metrics(log.path)[0]["train/loss"] is None
    log.close()


def test_a_resumed_run_writes_the_later_lines_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    # the last line was cut by a crash
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    drop_steps_after(path, 2)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_metric_names_are_unique_and_explained() -> None:
    assert len(METRIC_OF_NAME) == len(METRICS)
    assert all("/" in metric.name and metric.meaning for metric in METRICS)


def test_a_full_disk_is_told_with_the_file_when_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr("os.open", lambda *_: full)
    with pytest.raises(OSError, match="No space left on device") as told:
        drop_steps_after(path, 1)
    assert told.value.filename == str(path)


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            {"ok": 1.0, "note": "good", "per_rank": np.zeros(2)},
            r"step 3: logged metrics must be numbers: note .str., per_rank",
        ),
        ({"step": 9.0}, "step 3: logged 'step', which is reserved"),
    ],
)
def test_what_cannot_be_a_metric_is_named(
    tmp_path: Path, metrics: dict[str, Any], sentence: str
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=sentence):
        log.write(3, metrics)
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_all_changed_settings_are_named_up_to_four(tmp_path: Path) -> None:
    settings = "".join(f"s{number} = 1\n" for number in range(6))
    RunFolder.open(tmp_path / "r", settings, {}).metrics.write_text('{"step": 1}\n')
    for changed, said in ((2, r"\(s0 was 1, is 2, s1 was 1, is 2\)"), (6, r"s3 .*, and 2 more\)")):
        other = settings.replace("= 1", "= 2", changed)
        with pytest.raises(ConfigError, match=said):
            RunFolder(tmp_path / "r").check_reusable(other, resume=False)
