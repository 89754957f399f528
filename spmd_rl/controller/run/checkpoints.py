"""Checkpoints of a whole run: one folder each, whole from the moment that all it names is there.

checkpoints/step_000040/
    trainer/        what a role wrote through its `save` endpoint, perhaps still writing it behind
    the next steps ahead/          what an object of the recipe wrote in the same way state.json
    written last of what the controller writes: the next step, small states, what else belongs to it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
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
UNFINISHED = ".unfinished"  # an empty file that stands in a folder until all of it is written
LATER = "later"  # where folders are laid aside
NAME = re.compile(r"step_\d{6,}")


class Stateful(Protocol):
    """An object of the recipe whose state is a little plain data."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Stored(Protocol):
    """An object of the recipe that writes a folder of its own, whole by the time that `save`
    returns.
    """

    def save(self, folder: str) -> None: ...

    def load(self, folder: str) -> None: ...


Part = Role | Stateful | Stored


@dataclass(frozen=True)
class Record:
    """The state file. `reward` is the mean reward of the step before; `roles` are the axes that
    each role was on.

    `checksums` are of the files of what is stored; a role's are its own affair.
    """

    next_step: int
    seed: int
    reward: float | None = None
    roles: dict[str, dict[str, int]] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    checksums: dict[str, dict[str, int]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)


class Checkpoints:
    """The run's checkpoints; the newest `keep` of them stay, and the `keep_best` with the highest
    reward.
    """

    def __init__(self, folder: Path, keep: int, keep_best: int) -> None:
        self.folder = folder
        self._keep = keep
        self._keep_best = keep_best
        self._open: Path | None = None  # begun, and perhaps not yet whole
        self._writing: list[Handle] = []

    def saved(self) -> dict[Path, Record]:
        """Whole checkpoints, oldest first."""
        read = {path: _read(path) for path in self._folders()}
        whole = [(path, record) for path, record in read.items() if record is not None]
        return dict(sorted(whole, key=lambda item: item[1].next_step))

    def newest(self) -> int | None:
        """The step that the newest whole checkpoint was taken after, if there is one."""
        return next((record.next_step for record in reversed(self.saved().values())), None)

    def save(self, record: Record, parts: Mapping[str, Part]) -> None:
        """Begin the checkpoint that `record` describes: all parts as they are now, once the one
        before is whole.

        Blocks: while roles copy what they hold. Those that have an endpoint `saved` write it later;
        `settle` waits for them. Raises: what a role raised, or DiskError when the disk does not
        take it.
        """
        self.settle()
        target = self.folder / f"step_{record.next_step:06d}"
        atomic_write.remove_folder(target)
        try:
            target.mkdir(parents=True)
            self._write(target, record, parts)
        except (OSError, SpmdError) as error:
            atomic_write.remove_folder(
                target
            )  # it serves nobody, and takes room on a disk that may be full
            if isinstance(error, SpmdError):
                raise
            raise DiskError(f"cannot save {target}: {error}") from error

    def settle(self) -> None:
        """Wait until the last checkpoint is whole, and drop those that need not stay.

        Raises: what kept a role from writing it.
        """
        if self._open is None:
            return
        try:
            for handle in self._writing:
                handle.saved.call()
        except SpmdError:
            atomic_write.remove_folder(self._open)
            raise
        _flush(self._open.rglob("*"))
        (self._open / UNFINISHED).unlink(missing_ok=True)
        self._open = None
        saved = self.saved()
        stay = {*list(saved)[-self._keep :], *best_first(saved)[: self._keep_best]}
        for path in saved.keys() - stay:
            atomic_write.remove_folder(path)

    def restore(self, parts: Mapping[str, Part]) -> tuple[Path, Record] | None:
        """Load the newest checkpoint into the parts, if there is one.

        What a crash left unfinished is removed. A folder that somebody made incomplete is laid
        aside in `later/`.
        Raises: ConfigError when it holds other parts, or where an incomplete folder is all that
        there is.
        """
        if self.folder.is_symlink():
            raise ConfigError(
                f"{self.folder} is a symbolic link, which is not followed: set run.folder instead"
            )
        saved = self.saved()
        self._clear_up(self._folders() - saved.keys(), fresh=not saved)
        if not saved:
            return None
        path, record = list(saved.items())[-1]
        try:
            self._load(path, record, parts)
        except SpmdError as error:
            # which an earlier one has as well
            if len(saved) > 1 and not isinstance(error, (ConfigError, DataError)):
                before = list(saved.values())[-2].next_step
                advice = f"spmd-rl rewind {self.folder.parent} {before}"
                error.args = (
                    f"{error}; `{advice}` and the same command go on from the checkpoint before",
                )
            raise
        return path, record

    def _clear_up(self, incomplete: Iterable[Path], fresh: bool) -> None:
        for path in sorted(incomplete):
            parts = [
                entry.name
                for entry in path.iterdir()
                if entry.is_dir() and not entry.name.startswith(".")
            ]
            if (path / UNFINISHED).is_file() or not parts:
                atomic_write.remove_folder(path)
            elif fresh:
                raise ConfigError(
                    f"{path} holds {', '.join(sorted(parts))} but is incomplete, and there is no other checkpoint: "
                    "put back what is missing, or move the folder away to start at step 1"
                )
            else:
                print(f"{path} is incomplete and was moved to {lay_aside(path)}", flush=True)

    def _load(self, path: Path, record: Record, parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            if name not in {*record.roles, *record.stored, *record.states}:
                raise ConfigError(
                    f"{path} was saved by another recipe: it has no state of '{name}'"
                )
            if isinstance(part, Handle):
                part.load.call(str(path / name))
            elif isinstance(part, Stored):
                check(path / name, record.checksums.get(name, {}))
                part.load(str(path / name))
            else:
                cast(Stateful, part).restore(record.states[name])

    def _folders(self) -> set[Path]:
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return {
            path
            for path in entries
            if NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        }

    def _write(self, target: Path, record: Record, parts: Mapping[str, Part]) -> None:
        (target / UNFINISHED).touch()
        roles = {name: part for name, part in parts.items() if isinstance(part, Handle)}
        pending = [handle.save.start(str(target / name)) for name, handle in roles.items()]
        for name, part in parts.items():
            if name in roles:
                record.roles[name] = dict(roles[name].placement.axes)
            elif isinstance(part, Stored):
                record.stored.append(name)
                part.save(str(target / name))
                record.checksums[name] = checksums(target / name)
            else:
                record.states[name] = cast(Stateful, part).state()
        for call in pending:
            call.wait()
        self._writing = [handle for handle in roles.values() if "saved" in handle.endpoints]
        unfinished = target / f".{STATE_FILE}.part"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        _flush(
            [unfinished, *(path for name in record.stored for path in (target / name).rglob("*"))]
        )
        os.replace(unfinished, target / STATE_FILE)
        self._open = target


def lay_aside(path: Path) -> Path:
    """Move a checkpoint's folder to `later/` beside it, under the first free name like its own;
    returns where it is.
    """
    aside = path.parent / LATER
    aside.mkdir(exist_ok=True)
    names = (
        aside / f"{path.name}{suffix}"
        for suffix in ("", *(f".{number}" for number in range(1, 1_000_000)))
    )
    return path.rename(next(name for name in names if not name.exists()))


def best_first(saved: Mapping[Path, Record]) -> list[Path]:
    """Those with a reward, the highest first, and the newest of equals."""
    rewards = [(record.reward, path) for path, record in saved.items() if record.reward is not None]
    return [path for _, path in sorted(rewards, reverse=True)]


def _read(path: Path) -> Record | None:
    """The record of a checkpoint, None while it is not whole."""
    try:
        record = msgspec.json.decode((path / STATE_FILE).read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, RecursionError) as error:
        problem = f"{path / STATE_FILE} is no checkpoint's state: {error}"
        raise ConfigError(f"{problem}; remove {path} to go on from the one before it") from error
    return (
        record if all((path / name).is_dir() for name in (*record.roles, *record.stored)) else None
    )


def _flush(paths: Iterable[Path]) -> None:
    """Let what the system still holds of these files reach the disk, before a name or an end relies
    on it.
    """
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
