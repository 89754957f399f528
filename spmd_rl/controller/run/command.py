"""`spmd-rl rewind`: lay the checkpoints after one aside, so that the run goes on from that one."""

from __future__ import annotations

import os
from pathlib import Path

from spmd_rl.controller.run.checkpoints import Checkpoints, best_first, lay_aside
from spmd_rl.errors import ConfigError
from spmd_rl.observe.run_folder import refuse_links
from spmd_rl.observe.run_lock import acquire_run_lock

USAGE = "usage: spmd-rl rewind RUN best|STEP"


def main(words: list[str]) -> int:
    """Rewind the run in the folder that `words` name to its best checkpoint, or to the one after a
    step.
    """
    if len(words) != 2 or words[0].startswith("-"):
        print(USAGE)
        return 0 if words[:1] in (["--help"], ["-h"]) else 2
    run, wanted = Path(words[0]), words[1]
    chosen, laid_aside = rewind(run / "checkpoints", wanted)
    for path in laid_aside:
        print(f"{path.name} is now in {path.parent}")
    print(f"the same command goes on from {chosen}")
    return 0


def rewind(folder: Path, wanted: str) -> tuple[Path, list[Path]]:
    """Move the checkpoints after the wanted one to `later/`; returns that one, and where the others
    are.

    Raises: ConfigError when there is no such checkpoint, or a run is writing them.
    """
    refuse_links(folder.parent)
    saved = Checkpoints(folder, 1, 0).saved()
    named = {str(record.next_step): path for path, record in saved.items()}
    if best := best_first(saved):
        named["best"] = best[0]
    if wanted not in named:
        raise ConfigError(
            f"no checkpoint '{wanted}' in {folder}: there are {', '.join(named) or 'none'}"
        )
    chosen = named[wanted]
    later = list(saved)[list(saved).index(chosen) + 1 :]
    claimed = acquire_run_lock(folder.parent, wait_s=0.0)
    try:
        return chosen, [lay_aside(path) for path in later]
    finally:
        os.close(claimed)
