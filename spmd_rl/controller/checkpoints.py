"""Checkpoints of a whole run: each step saved is one folder, which appears under its name only when it is whole.

checkpoints/step_000040/
    state.json      the next step, and the state of everything that lives in the recipe (a data stream, say)
    trainer/        what a role wrote through its `save` endpoint
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Protocol, cast

from spmd_rl.controller.endpoint import Role
from spmd_rl.controller.handle import Handle
from spmd_rl.errors import ConfigError

STATE_FILE = "state.json"


class Stateful(Protocol):
    """An object of the recipe whose state is plain data."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


Part = Role | Stateful


class Checkpoints:
    """The run's checkpoints; the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def saved(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step_*") if (path / STATE_FILE).is_file())

    def save(self, next_step: int, parts: dict[str, Part]) -> Path:
        """Write every part, then rename the whole into place and drop what is older than the newest `keep`.

        Blocks: until every role has written; a crash before the rename leaves the earlier checkpoints as they were.
        """
        target = self.folder / f"step_{next_step:06d}"
        part = self.folder / f".{target.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        states: dict[str, Any] = {}
        for name, item in parts.items():
            if isinstance(item, Handle):
                item.save.call(str(part / name))
            else:
                states[name] = cast(Stateful, item).state()
        (part / STATE_FILE).write_text(json.dumps({"next_step": next_step, "states": states}, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(part, target)
        for old in self.saved()[: -self.keep]:
            shutil.rmtree(old)
        return target

    def restore(self, parts: dict[str, Part]) -> int:
        """Load the newest checkpoint into the parts; returns the step to go on with, 0 when there is none.

        Raises: ConfigError when the checkpoint holds other parts.
        """
        if not self.saved():
            return 0
        newest = self.saved()[-1]
        record = json.loads((newest / STATE_FILE).read_text())
        for name, item in parts.items():
            if isinstance(item, Handle):
                item.load.call(str(newest / name))
            elif name in record["states"]:
                cast(Stateful, item).restore(record["states"][name])
            else:
                raise ConfigError(f"{newest} was saved by another recipe: it has no state of '{name}'")
        return int(record["next_step"])
