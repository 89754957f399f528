"""Did you mean: the known name, or the path on this disk, that a mistyped one is most like."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

LIKENESS = 0.6  # least, of 1
MAX_CHARACTERS = 200  # of a name that is compared


def likely_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like `name`, in letters of any case; "" if none is."""
    by_letters = {one.casefold(): one for one in known}
    near = get_close_matches(name[:MAX_CHARACTERS].casefold(), by_letters, 1, LIKENESS)
    return by_letters[near[0]] if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that asks for the likely name; "" if there is none."""
    likely = likely_name(name, known)
    return f"; did you mean {likely}?" if likely else ""


def did_you_mean_path(path: str | Path) -> str:
    """Return the end of a sentence that asks for the path that may be meant; "" if there is none.

    It differs in the first name that is not there, and exists.
    """
    wanted = Path(path)
    for above in reversed(wanted.parents):
        rest = wanted.relative_to(above).parts
        if (above / rest[0]).exists():
            continue
        likely = likely_name(rest[0], _names(above, rest[1:]))
        return f"; did you mean {above.joinpath(likely, *rest[1:])}?" if likely else ""
    return ""


def _names(folder: Path, rest: tuple[str, ...]) -> list[str]:
    """Return the names in a folder under which there is `rest`."""
    try:
        return [one.name for one in folder.iterdir() if one.joinpath(*rest).exists()]
    except OSError:  # no folder, or one that this user cannot read: then nothing is proposed
        return []
