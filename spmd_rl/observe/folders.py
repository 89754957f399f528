"""Folders that appear under their name only when they are whole, and removal that never follows a
symbolic link.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def part_of(target: Path) -> Path:
    """Where `target` is written before it is whole."""
    return target.with_name(f".{target.name}.part")


def begin(target: Path) -> Path:
    """Make an empty folder to write `target` in; what an earlier attempt left there is removed."""
    part = part_of(target)
    remove(part)
    part.mkdir(parents=True)
    return part


def finish(target: Path) -> None:
    """Give what was written since `begin` its name. An earlier folder of that name is replaced."""
    old = target.with_name(f".{target.name}.old")
    remove(old)
    if target.exists():
        os.rename(target, old)
    os.rename(part_of(target), target)
    remove(old)


def remove(path: Path) -> None:
    """Remove a folder with all that it holds, or a link alone. Does nothing where there is neither."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
