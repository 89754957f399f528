"""`spmd-rl rewind`: move later checkpoints aside, so that a run continues from an earlier one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.config.likely import did_you_mean_path
from spmd_rl.controller.run.checkpoints import Checkpoints, CheckpointState, move_to_later
from spmd_rl.controller.run.evaluations import best_of_run
from spmd_rl.errors import ConfigError
from spmd_rl.observe.run_folder import refuse_links
from spmd_rl.observe.run_lock import acquire_run_lock

USAGE = "usage: spmd-rl rewind RUN best|STEP"


def main(words: list[str]) -> int:
    """Rewind the run whose folder `words` name to its best checkpoint, or to that after a step."""
    if len(words) != 2 or words[0].startswith("-"):
        print(USAGE)
        return 0 if words[:1] in (["--help"], ["-h"]) else 2
    run, wanted = Path(words[0]), words[1]
    chosen, moved = rewind(run / "checkpoints", wanted)
    for path in moved:
        print(f"{path.name} is now in {path.parent}")
    print(f"the same command goes on from {chosen}")
    return 0


def rewind(folder: Path, wanted: str) -> tuple[Path, list[Path]]:
    """Move the checkpoints after the wanted one to `later/`; return it, and the moved ones.

    Raises: ConfigError when there is no such checkpoint, or a run is writing them.
    """
    refuse_links(folder.parent)
    complete = Checkpoints(folder).complete()
    chosen = _find(wanted, complete, folder)
    paths = list(complete)
    later = paths[paths.index(chosen) + 1 :]
    lock = acquire_run_lock(folder.parent, wait_s=0.0)
    try:
        return chosen, [move_to_later(path) for path in later]
    finally:
        os.close(lock)


def _find(wanted: str, complete: Mapping[Path, CheckpointState], folder: Path) -> Path:
    """Return the checkpoint after step `wanted`, or the best one."""
    by_name = {str(state.next_step): path for path, state in complete.items()}
    if best := best_of_run(folder.parent, complete):
        by_name["best"] = best[0]
    if wanted not in by_name:
        raise ConfigError(
            f"no checkpoint '{wanted}' in {folder}: there are {', '.join(by_name) or 'none'}"
            f"{did_you_mean_path(folder.parent)}"
        )
    return by_name[wanted]
