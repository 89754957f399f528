"""Files of spmd_rl that a benchmark ran, with one digest of all that they said.

Those that a process ran are those that it imported. For what ran in other processes, a script names
rooms.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

PACKAGE = Path(__file__).parents[1] / "spmd_rl"
A_RUN = (  # the rooms of `spmd-rl run`
    *("algo", "controller", "data", "hooks", "kernels", "mesh", "model", "observe", "offload"),
    *("recipes", "rewards", "rollout", "train", "types", "weights"),
)
ALL = (".",)
SOURCES = (".py", ".cu")


class RanFiles(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Paths below spmd_rl with spaces between them, where a folder stands for all files in it."""

    files: str
    digest: str


def ran_files(rooms: Iterable[str] = ()) -> RanFiles:
    """Return the files that this process has imported, and these rooms."""
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = {Path(file) for file in loaded if file}
    found = {path.relative_to(PACKAGE) for path in paths if path.is_relative_to(PACKAGE)}
    return _kept(found | {Path(room) for room in rooms})


def joined(one: RanFiles, other: RanFiles) -> RanFiles:
    """Return the files of both, as they are now."""
    return _kept({Path(name) for name in f"{one.files} {other.files}".split()})


def digest_of(files: str) -> str:
    """Return the digest of what these files say now; a file that is gone says nothing."""
    digest = hashlib.sha256()
    for path in map(PACKAGE.joinpath, files.split()):
        inside = [one for one in path.rglob("*") if one.suffix in SOURCES]
        for source in sorted(inside) if path.is_dir() else [path]:
            text = source.read_bytes() if source.is_file() else b""
            digest.update(f"{source.relative_to(PACKAGE)}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]


def _kept(paths: set[Path]) -> RanFiles:
    """Return these paths, without those in a folder among them."""
    files = " ".join(sorted(str(path) for path in paths if paths.isdisjoint(path.parents)))
    return RanFiles(files=files, digest=digest_of(files))
