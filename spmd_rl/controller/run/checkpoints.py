"""Checkpoints of a run: one folder each, which is complete once everything that it names is there.

checkpoints/step_000040/
    trainer/     written by the `save` endpoint of a role, perhaps during the next steps
    ahead/       written by the `save` method of an object of the recipe
    state.json   written last by the controller: next step, small states, names of the other parts
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import msgspec

from spmd_rl.controller.endpoint import Role
from spmd_rl.controller.handle import Handle
from spmd_rl.controller.run.checksums import check, checksums
from spmd_rl.errors import ConfigError, DataError, DiskError, SpmdError
from spmd_rl.observe import atomic_write

STATE_FILE = "state.json"
UNFINISHED_FILE = ".unfinished"  # an empty file in a folder that is still being written
LATER_FOLDER = "later"  # for checkpoints that the run must not continue from
FOLDER_NAME = re.compile(r"step_\d{6,}")


class StatePart(Protocol):
    """An object of the recipe with a small state of plain data."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class FolderPart(Protocol):
    """An object of the recipe that writes a folder of its own, complete when `save` returns."""

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


@runtime_checkable
class ClosablePart(Protocol):
    """An object of the recipe that has something to end when the recipe has returned."""

    def close(self) -> None: ...


CheckpointPart = Role | StatePart | FolderPart


@dataclass(frozen=True)
class CheckpointState:
    """Content of the state file. `reward` is the mean reward of the last step; `roles` are the mesh
    axes of each role that was saved.

    `stored` names the parts with folders of their own, and `checksums` are those of their files.
    Each role keeps the checksums of its own files.
    """

    next_step: int
    seed: int
    reward: float | None = None
    roles: dict[str, dict[str, int]] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of a run. It keeps the newest `keep`, and the `keep_best` with the highest
    reward, or with the highest of the scores that `scores` returns.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 1,
        keep_best: int = 0,
        scores: Callable[[], Mapping[int, float] | None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._scores = scores
        self._unfinished: Path | None = None  # the folder that roles may still be writing
        self._savers: list[Handle] = []  # the roles that write it

    def complete(self) -> dict[Path, CheckpointState]:
        """Return the complete checkpoints by folder, oldest first."""
        states = {path: _read_state(path) for path in self._folders()}
        found = [(path, state) for path, state in states.items() if state is not None]
        return dict(sorted(found, key=lambda item: item[1].next_step))

    def newest(self) -> int | None:
        """Return the step after which the newest complete checkpoint was saved, if there is one."""
        return next((state.next_step for state in reversed(self.complete().values())), None)

    def save(self, state: CheckpointState, parts: Mapping[str, CheckpointPart]) -> None:
        """Begin a checkpoint of all parts as they are now, once the checkpoint before is complete.

        `state` says what the checkpoint is of; its parts are filled in here.
        Blocks: while roles copy their state. They may write it later; `wait_until_complete` waits
        for that.
        Raises: what a role raised, or DiskError when the disk does not take it.
        """
        self.wait_until_complete()
        target = self.folder / f"step_{state.next_step:06d}"
        atomic_write.remove_folder(target)
        try:
            target.mkdir(parents=True)
            self._write(target, state, parts)
        except (OSError, SpmdError) as error:
            atomic_write.remove_folder(target)  # the disk may be full
            if isinstance(error, SpmdError):
                raise
            raise DiskError(f"cannot save {target}: {error}") from error

    def wait_until_complete(self) -> None:
        """Wait until the last checkpoint is complete, then remove those that need not stay.

        Raises: the error that kept a role from writing it.
        """
        if self._unfinished is None:
            return
        try:
            for handle in self._savers:
                handle.wait_until_saved.call()
        except SpmdError:
            atomic_write.remove_folder(self._unfinished)
            raise
        _flush(self._unfinished.rglob("*"))
        (self._unfinished / UNFINISHED_FILE).unlink(missing_ok=True)
        self._unfinished = None
        complete = self.complete()
        newest = list(complete)[-self._keep :]
        best = best_first(complete, self._scores())[: self._keep_best]
        for path in complete.keys() - {*newest, *best}:
            atomic_write.remove_folder(path)

    def restore(self, parts: Mapping[str, CheckpointPart]) -> tuple[Path, CheckpointState] | None:
        """Load the newest complete checkpoint into the parts, if there is one.

        Folders that a crash left unfinished are removed. Folders that somebody made incomplete are
        moved to `later/`.
        Raises: ConfigError when the checkpoint holds other parts, or when there are only incomplete
        folders.
        """
        if self.folder.is_symlink():
            raise ConfigError(
                f"{self.folder} is a symbolic link, which is not followed: set run.folder instead"
            )
        complete = self.complete()
        self._clear_up(self._folders() - complete.keys(), others_exist=bool(complete))
        if not complete:
            return None
        path, state = list(complete.items())[-1]
        try:
            self._load(path, state, parts)
        except SpmdError as error:
            self._advise_rewind(error, complete)
            raise
        return path, state

    def _advise_rewind(self, error: SpmdError, complete: Mapping[Path, CheckpointState]) -> None:
        """Add to the error's message how to go on from the last but one checkpoint, if it helps."""
        # a wrong config or data set is wrong for an earlier checkpoint too
        if len(complete) > 1 and not isinstance(error, (ConfigError, DataError)):
            before = list(complete.values())[-2].next_step
            advice = f"spmd-rl rewind {self.folder.parent} {before}"
            error.args = (
                f"{error}; `{advice}` and the same command go on from the checkpoint before",
            )

    def _clear_up(self, incomplete: Iterable[Path], others_exist: bool) -> None:
        for path in sorted(incomplete):
            parts = [part.name for part in path.glob("[!.]*") if part.is_dir()]
            if (path / UNFINISHED_FILE).is_file() or not parts:
                atomic_write.remove_folder(path)
            elif not others_exist:
                raise ConfigError(
                    f"{path} holds {', '.join(sorted(parts))} but is incomplete, "
                    "and there is no other checkpoint: "
                    "put back what is missing, or move the folder away to start at step 1"
                )
            else:
                print(f"{path} is incomplete and was moved to {move_to_later(path)}", flush=True)

    def _load(
        self, path: Path, state: CheckpointState, parts: Mapping[str, CheckpointPart]
    ) -> None:
        for name, part in parts.items():
            if name not in {*state.roles, *state.stored, *state.states}:
                raise ConfigError(
                    f"{path} was saved by another recipe: it has no state of '{name}'"
                )
            if isinstance(part, Handle):
                part.load.call(str(path / name))
            elif isinstance(part, FolderPart):
                check(path / name, state.checksums.get(name, {}))
                part.load(str(path / name))
            else:
                _restore(path, name, cast(StatePart, part), state.states[name])

    def _folders(self) -> set[Path]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return {
            path
            for path in entries
            if FOLDER_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        }

    def _write(
        self, target: Path, state: CheckpointState, parts: Mapping[str, CheckpointPart]
    ) -> None:
        (target / UNFINISHED_FILE).touch()
        roles = {name: part for name, part in parts.items() if isinstance(part, Handle)}
        pending = [handle.save.start(str(target / name)) for name, handle in roles.items()]
        _add_parts(state, target, parts)
        for call in pending:
            call.wait()
        self._savers = list(roles.values())
        _write_state(target, state)
        self._unfinished = target


def move_to_later(path: Path) -> Path:
    """Move a checkpoint's folder to `later/` beside it; return its new path.

    It keeps its name, with a number behind it where that name is taken.
    """
    later = path.parent / LATER_FOLDER
    later.mkdir(exist_ok=True)
    target = later / path.name
    numbers = itertools.count(1)
    while target.exists():
        target = later / f"{path.name}.{next(numbers)}"
    return path.rename(target)


def best_first(
    checkpoints: Mapping[Path, CheckpointState], scores: Mapping[int, float] | None = None
) -> list[Path]:
    """Return the checkpoints that have a reward, the highest first, and the newest of equals.

    With `scores`, by the steps of the weights, these count instead.
    """
    rewards = [
        (state.reward if scores is None else scores.get(state.next_step), state.next_step, path)
        for path, state in checkpoints.items()
    ]
    known = [(reward, step, path) for reward, step, path in rewards if reward is not None]
    return [path for _, _, path in sorted(known, reverse=True)]


def _add_parts(state: CheckpointState, target: Path, parts: Mapping[str, CheckpointPart]) -> None:
    """Add each part to a checkpoint's state, and save those that write a folder of their own."""
    for name, part in parts.items():
        if isinstance(part, Handle):
            state.roles[name] = part.saved_axes
        elif isinstance(part, FolderPart):
            state.stored.append(name)
            part.save(str(target / name))
            state.checksums[name] = checksums(target / name)
        else:
            state.states[name] = cast(StatePart, part).state()


def _write_state(target: Path, state: CheckpointState) -> None:
    """Write the state's file, after the folders that it names are on the disk."""
    temporary = target / f".{STATE_FILE}.part"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(state)) + b"\n")
    stored = [path for name in state.stored for path in (target / name).rglob("*")]
    _flush([temporary, *stored])
    os.replace(temporary, target / STATE_FILE)


def _read_state(path: Path) -> CheckpointState | None:
    """Return the state of a checkpoint; None while it is not complete."""
    try:
        state = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=CheckpointState)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{path / STATE_FILE} is no checkpoint's state: {error}"
        raise ConfigError(f"{problem}; remove {path} to go on from the one before it") from error
    folders_of_parts = [path / name for name in (*state.roles, *state.stored)]
    return state if all(folder.is_dir() for folder in folders_of_parts) else None


def _restore(path: Path, name: str, part: StatePart, state: dict[str, Any]) -> None:
    """Restore a part. Raises: ConfigError where the file does not hold what `state` returned."""
    try:
        part.restore(state)
    except (KeyError, TypeError, ValueError) as error:
        where = f"{path / STATE_FILE} does not hold the state of '{name}'"
        raise ConfigError(f"{where} as it was written: {type(error).__name__}: {error}") from error


def _flush(paths: Iterable[Path]) -> None:
    """Have the system write the content of these files to the disk."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
