"""Checkpoints of a run: each is complete or does not count, and only some of them stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.pending import Pending
from spmd_rl.controller.run.checkpoints import (
    STATE_FILE,
    UNFINISHED_FILE,
    Checkpoints,
    CheckpointState,
)
from spmd_rl.controller.run.command import rewind
from spmd_rl.data.sft_file import SftFile
from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.mesh.split import Placement
from spmd_rl.observe.run_lock import acquire_run_lock
from tests.unit.observe.damaged import DAMAGED


class CursorPart:
    def __init__(self, drawn: int = 0) -> None:
        self.drawn = drawn

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


class WordPart:
    """An object that writes a folder of its own."""

    def __init__(self, word: str = "") -> None:
        self.word = word

    def save(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "word").write_text(self.word)

    def load(self, folder: str) -> None:
        self.word = (Path(folder) / "word").read_text()


class SlowSaver(Handle):
    """A role whose folder appears only when `wait_until_saved` is called."""

    def __init__(self, word: str = "") -> None:
        self.word = word
        self.placement = Placement("trainer", (0, 1), {"dp": 1, "fsdp": 2, "tp": 1})
        self.num_parts = 0
        self.writing: tuple[str, str] | None = None
        self.endpoints = {
            "save": LocalCall(self._save),
            "wait_until_saved": LocalCall(self._saved),
            "load": LocalCall(self._load),
        }

    def _save(self, folder: str) -> None:
        self.writing = folder, self.word

    def _saved(self) -> None:
        if self.writing is not None:
            WordPart(self.writing[1]).save(self.writing[0])
            self.writing = None

    def _load(self, folder: str) -> None:
        self.word = (Path(folder) / "word").read_text()


class LocalCall:
    def __init__(self, function: Any) -> None:
        self.call = function

    def start(self, *args: Any) -> Pending[Any]:
        value = self.call(*args)
        return Pending(lambda deadline_s: value)


def checkpoints(folder: Path, keep: int = 2, keep_best: int = 0) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep, keep_best)


def names(run_checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in run_checkpoints.complete()]


def test_all_kinds_of_parts_come_back(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(
        CheckpointState(3, 7),
        {"trainer": (saver := SlowSaver("w")), "prompts": CursorPart(12), "ahead": WordPart("a")},
    )
    saver._saved()
    parts = {"trainer": SlowSaver(), "prompts": CursorPart(), "ahead": WordPart()}
    found = checkpoints(tmp_path).restore(parts)
    assert found is not None
    assert (found[0].name, found[1].next_step, found[1].seed) == ("step_000003", 3, 7)
    assert found[1].roles == {"trainer": {"dp": 1, "fsdp": 2, "tp": 1}}
    assert (parts["trainer"].word, parts["prompts"].drawn, parts["ahead"].word) == ("w", 12, "a")


@pytest.mark.parametrize("change", [lambda word: word.write_text("b"), Path.unlink])
def test_a_file_that_changed_is_refused(tmp_path: Path, change: Callable[[Path], None]) -> None:
    run_checkpoints, ahead = checkpoints(tmp_path), WordPart("a")
    for step in (1, 2):
        run_checkpoints.save(CheckpointState(step, 0), {"ahead": ahead})
    change(tmp_path / "checkpoints/step_000002/ahead/word")
    with pytest.raises(
        SpmdError, match=r"ahead/word is .*the checkpoint is not as|ahead/word is not as"
    ) as error:
        checkpoints(tmp_path).restore({"ahead": WordPart()})
    assert f"`spmd-rl rewind {tmp_path} 1` and the same command" in str(error.value)
    rewind(tmp_path / "checkpoints", "1")
    assert checkpoints(tmp_path).restore({"ahead": (again := WordPart())}) is not None
    assert again.word == "a"


def test_nothing_saved_is_a_fresh_run(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).restore({"prompts": CursorPart()}) is None


def test_a_checkpoint_counts_from_the_moment_that_the_last_part_is_there(tmp_path: Path) -> None:
    run_checkpoints, trainer = checkpoints(tmp_path), SlowSaver("first")
    run_checkpoints.save(CheckpointState(1, 0), {"trainer": trainer})
    assert names(run_checkpoints) == []
    trainer.word = "second"  # training goes on
    run_checkpoints.save(CheckpointState(2, 0), {"trainer": trainer})
    assert names(run_checkpoints) == ["step_000001"], "one is written at a time"
    run_checkpoints.wait_until_complete()
    assert names(run_checkpoints) == ["step_000001", "step_000002"]
    assert [(path / "trainer/word").read_text() for path in run_checkpoints.complete()] == [
        "first",
        "second",
    ]


@pytest.mark.parametrize("lost", ["trainer", "ahead", STATE_FILE])
def test_what_a_crash_left_unfinished_is_passed_over_and_removed(tmp_path: Path, lost: str) -> None:
    run_checkpoints = checkpoints(tmp_path)
    for step in (1, 2):
        run_checkpoints.save(
            CheckpointState(step, 0),
            {"trainer": SlowSaver(f"{step}"), "ahead": WordPart(f"{step}")},
        )
    run_checkpoints.wait_until_complete()
    folder = tmp_path / "checkpoints/step_000002"
    (folder / lost).rename(folder / f".{lost}.part")
    (folder / UNFINISHED_FILE).touch()
    again = {"trainer": SlowSaver(), "ahead": WordPart()}
    found = checkpoints(tmp_path).restore(again)
    assert found is not None
    assert (found[1].next_step, again["trainer"].word, again["ahead"].word) == (1, "1", "1")
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.parametrize("lost", ["trainer", "ahead", STATE_FILE])
def test_a_folder_that_somebody_made_incomplete_is_laid_aside(
    tmp_path: Path, capsys, lost: str
) -> None:
    """A partial copy between clusters must cost no weights."""
    run_checkpoints, folder = checkpoints(tmp_path), tmp_path / "checkpoints"
    for step in (1, 2):
        run_checkpoints.save(
            CheckpointState(step, 0),
            {"trainer": SlowSaver(f"{step}"), "ahead": WordPart(f"{step}")},
        )
    run_checkpoints.wait_until_complete()
    (folder / "step_000002" / lost).rename(tmp_path / "elsewhere")
    found = checkpoints(tmp_path).restore({"trainer": SlowSaver(), "ahead": WordPart()})
    assert found is not None and found[1].next_step == 1
    assert (
        f"step_000002 is incomplete and was moved to {folder}/later/step_000002"
        in capsys.readouterr().out
    )
    left = {entry.name for entry in (folder / "later/step_000002").iterdir()}
    assert left == {"trainer", "ahead", STATE_FILE} - {lost}


def test_a_run_does_not_begin_anew_beside_weights_without_a_state_file(tmp_path: Path) -> None:
    run_checkpoints, folder = checkpoints(tmp_path), tmp_path / "checkpoints"
    for step in (1, 2):
        run_checkpoints.save(CheckpointState(step, 0), {"trainer": SlowSaver(f"{step}")})
    run_checkpoints.wait_until_complete()
    for path in folder.iterdir():
        (path / STATE_FILE).unlink()
    with pytest.raises(
        ConfigError,
        match=r"step_000001 holds trainer but is incomplete, and there is no other check",
    ):
        checkpoints(tmp_path).restore({"trainer": SlowSaver()})
    assert sorted(
        (path.name, (path / "trainer/word").read_text()) for path in folder.iterdir()
    ) == [
        ("step_000001", "1"),
        ("step_000002", "2"),
    ]


def test_a_users_copy_is_no_checkpoint_and_stays(tmp_path: Path) -> None:
    run_checkpoints, folder = checkpoints(tmp_path, keep=1), tmp_path / "checkpoints"
    run_checkpoints.save(CheckpointState(1, 0), {"prompts": CursorPart(1)})
    run_checkpoints.wait_until_complete()
    shutil.copytree(folder / "step_000001", folder / "step_000001_mine")
    run_checkpoints.save(CheckpointState(2, 0), {"prompts": CursorPart(2)})
    run_checkpoints.wait_until_complete()
    assert checkpoints(tmp_path).restore({"prompts": CursorPart()}) is not None
    assert {path.name for path in folder.iterdir()} == {"step_000001_mine", "step_000002"}


def test_links_in_a_received_folder_lead_nowhere(tmp_path: Path) -> None:
    """What a link points to is neither removed nor written to."""
    precious = tmp_path / "precious"
    (precious / "trainer").mkdir(parents=True)
    run_checkpoints, folder = checkpoints(tmp_path, keep=1), tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2):
        (folder / f"step_{step:06d}").symlink_to(precious)
    assert checkpoints(tmp_path).restore({"ahead": WordPart()}) is None
    for step in (1, 2, 3):
        run_checkpoints.save(CheckpointState(step, 0), {"ahead": WordPart("mine")})
        run_checkpoints.wait_until_complete()
    assert [path.name for path in precious.rglob("*")] == ["trainer"]
    assert names(run_checkpoints) == ["step_000003"]


def test_a_link_in_place_of_the_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "precious")
    with pytest.raises(
        ConfigError, match=r"checkpoints is a symbolic link, which is not followed: set run\.folder"
    ):
        checkpoints(tmp_path).restore({"prompts": CursorPart()})


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_state_file_is_named(tmp_path: Path, content: bytes) -> None:
    checkpoints(tmp_path).save(CheckpointState(3, 7), {"prompts": CursorPart(12)})
    checkpoints(tmp_path).wait_until_complete()
    (tmp_path / "checkpoints/step_000003/state.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"step_000003.state.json"):
        checkpoints(tmp_path).restore({"prompts": CursorPart()})


@pytest.mark.parametrize("state", ["{}", '{"drawn": "x"}', '{"bytes": "x", "duplicates": 0}'])
def test_a_damaged_state_of_a_part_is_named(tmp_path: Path, state: str) -> None:
    first = checkpoints(tmp_path)
    first.save(CheckpointState(3, 7), {"file": SftFile(tmp_path / "sft.jsonl")})
    first.wait_until_complete()
    file = tmp_path / "checkpoints/step_000003/state.json"
    known = json.loads(file.read_text())
    known["states"]["file"] = json.loads(state)
    file.write_text(json.dumps(known))
    with pytest.raises(ConfigError, match=r"state.json does not hold the state of 'file'"):
        checkpoints(tmp_path).restore({"file": SftFile(tmp_path / "sft.jsonl")})


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    class Full(WordPart):
        def save(self, folder: str) -> None:
            raise OSError(28, "No space left on device", folder)

    run_checkpoints = checkpoints(tmp_path)
    run_checkpoints.save(CheckpointState(1, 0), {"ahead": WordPart("one")})
    with pytest.raises(SpmdError, match=r"cannot save .*step_000002: .*No space left on device"):
        run_checkpoints.save(CheckpointState(2, 0), {"ahead": Full()})
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_a_role_that_could_not_write_ends_the_next_save(tmp_path: Path) -> None:
    trainer = SlowSaver("w")

    def fail() -> None:
        raise SpmdError("cannot save: No space left on device")

    trainer.endpoints["wait_until_saved"] = LocalCall(fail)
    run_checkpoints = checkpoints(tmp_path)
    run_checkpoints.save(CheckpointState(1, 0), {"trainer": trainer})
    with pytest.raises(SpmdError, match="No space left"):
        run_checkpoints.save(CheckpointState(2, 0), {"trainer": trainer})
    assert list((tmp_path / "checkpoints").iterdir()) == [], "a torn checkpoint takes no room"


@pytest.mark.parametrize(
    ("keep", "keep_best", "stay"),
    [
        (2, 0, [4, 5]),
        (1, 1, [2, 5]),
        (2, 2, [2, 3, 4, 5]),
        (1, 9, [1, 2, 3, 4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, keep: int, keep_best: int, stay: list[int]
) -> None:
    run_checkpoints = checkpoints(tmp_path, keep, keep_best)
    for step, reward in enumerate([0.1, 0.9, 0.8, 0.2, 0.3], start=1):
        run_checkpoints.save(CheckpointState(step, 0, reward), {"prompts": CursorPart()})
    run_checkpoints.wait_until_complete()
    assert names(run_checkpoints) == [f"step_{step:06d}" for step in stay]


def test_no_reward_is_never_the_best(tmp_path: Path) -> None:
    run_checkpoints = checkpoints(tmp_path, keep=1, keep_best=1)
    for step in (1, 2, 3):
        run_checkpoints.save(CheckpointState(step, 0, None), {"prompts": CursorPart()})
    run_checkpoints.wait_until_complete()
    assert names(run_checkpoints) == ["step_000003"]


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(CheckpointState(1, 0), {"prompts": CursorPart()})
    with pytest.raises(ConfigError, match="it has no state of 'pairs'"):
        checkpoints(tmp_path).restore({"pairs": CursorPart()})


def test_a_state_file_that_is_none_is_named(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(CheckpointState(1, 0), {"prompts": CursorPart()})
    deep = '{"next_step": 1, "seed": 0, "states": {"prompts": {"drawn": ' + "[" * 100_000
    for text in ("{", deep):
        (tmp_path / "checkpoints/step_000001" / STATE_FILE).write_text(text)
        with pytest.raises(ConfigError, match=r"state\.json is no checkpoint's state"):
            checkpoints(tmp_path).restore({"prompts": CursorPart()})
    shutil.rmtree(tmp_path / "checkpoints/step_000001")
    assert checkpoints(tmp_path).restore({"prompts": CursorPart()}) is None


@pytest.mark.parametrize(
    "setting",
    [
        {"keep_checkpoints": 0},
        {"save_every": -1},
        {"keep_best": -1},
        {"deadline_s": 0.0},
        {"deadline_s": float("nan")},
        {"lost_after_s": 1.0},
        {"grace_s": -1.0},
        {"seed": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="or more"):
        RunConfig(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", "a\\b", "..", ".", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_of_runs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name = .*: expected the name of a folder in run.folder"):
        RunConfig(name=name)


@pytest.mark.parametrize("setting", [{"seed": 1 << 63}, {"grace_s": float("inf")}])
def test_settings_beyond_all_bounds_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} = .*: expected "):
        RunConfig(**setting)  # type: ignore[arg-type]


def test_what_else_lies_there_is_no_checkpoint_and_steps_are_numbers(tmp_path: Path) -> None:
    run_checkpoints = checkpoints(tmp_path, keep=9)
    for step in (999_999, 1_000_000):
        run_checkpoints.save(CheckpointState(step, 0), {"prompts": CursorPart(step)})
        run_checkpoints.wait_until_complete()
    (tmp_path / "checkpoints/step_notes.txt").write_text("a person's")
    cursor = CursorPart()
    found = checkpoints(tmp_path).restore({"prompts": cursor})
    assert found is not None
    assert (found[0].name, cursor.drawn) == ("step_1000000", 1_000_000)


def test_rewinding_lays_the_later_ones_aside(tmp_path: Path) -> None:
    run_checkpoints, folder = checkpoints(tmp_path, keep=9), tmp_path / "checkpoints"
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.5), (4, None)):
        run_checkpoints.save(CheckpointState(step, 0, reward), {"prompts": CursorPart(step)})
        run_checkpoints.wait_until_complete()
    with pytest.raises(ConfigError, match="no checkpoint '7' in .*: there are 1, 2, 3, 4, best"):
        rewind(folder, "7")
    chosen, aside = rewind(folder, "best")
    assert (chosen.name, [path.name for path in aside]) == (
        "step_000002",
        ["step_000003", "step_000004"],
    )
    cursor = CursorPart()
    found = checkpoints(tmp_path).restore({"prompts": cursor})
    assert found is not None
    assert (found[1].next_step, cursor.drawn) == (2, 2)
    run_checkpoints.save(CheckpointState(3, 0), {"prompts": CursorPart(33)})
    run_checkpoints.wait_until_complete()
    assert rewind(folder, "2")[1] == [folder / "later/step_000003.1"]
    assert all(
        (folder / "later" / name).is_dir()
        for name in ("step_000003", "step_000003.1", "step_000004")
    )


def test_a_live_run_is_not_rewound(tmp_path: Path) -> None:
    run_checkpoints = checkpoints(tmp_path)
    for step in (1, 2):
        run_checkpoints.save(CheckpointState(step, 0, 1.0 / step), {"prompts": CursorPart(step)})
        run_checkpoints.wait_until_complete()
    live = acquire_run_lock(tmp_path)
    with pytest.raises(ConfigError, match="another run is going on in"):
        rewind(tmp_path / "checkpoints", "best")
    assert list(run_checkpoints.complete()) == [
        tmp_path / "checkpoints/step_000001",
        tmp_path / "checkpoints/step_000002",
    ]
    os.close(live)
    assert rewind(tmp_path / "checkpoints", "best")[0].name == "step_000001"
