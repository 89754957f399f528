"""README and Makefile say the same of how long `make test` takes."""

from __future__ import annotations

import re

from tests.laws.source import ROOT

_TAKES = re.compile(r"^(?:# )?make test  .*: (about .*)$", re.MULTILINE)


def durations(text: str) -> list[str]:
    """Return what a text says of the command's duration."""
    return _TAKES.findall(text)


def test_one_command_has_one_duration() -> None:
    said = [
        durations((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "Makefile")
    ]
    assert said[0] == said[1]
    assert len(said[0]) == 1


def test_two_durations_are_seen() -> None:
    assert durations("make test    # all: about an hour\n# make test   all: about a day\n") == [
        "about an hour",
        "about a day",
    ]
