"""Page of the settings that do not go together, from the rows that a run is checked by.

python -m docs.build_combinations       # writes docs/combinations.md
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from spmd_rl.plan.combinations import Section, sections

PAGE = Path(__file__).parent / "combinations.md"
HEAD = """\
# Settings that do not go together

`python -m docs.build_combinations` writes this page from the rows by which a run is checked before
it starts, and `spmd-rl plan --combinations` prints them. A run is refused if all settings of a row
are as it says. It then says the sentence beside them, in which X stands for a value. What no row
refuses may still not fit the [model](models.md), the number of ranks or the host.

`split.train` stands for the ranks of any trainer. A setting is "set" if it is not 0, false or
empty; in the rows of algorithms, if it is not as by default. [Settings](settings.md) says what each
one does.
"""


def page(listed: Iterable[Section]) -> str:
    """Return the page's text."""
    parts = [HEAD]
    for section in listed:
        rows = [
            f"| {_settings(section.settings(row))} | {_plain(row.words_of_any())} |"
            for row in section.rows
        ]
        table = ["| settings | what a run says |", "| --- | --- |", *rows, ""]
        parts.append("\n".join([f"## {section.title}\n", *table]))
    return "\n".join(parts).rstrip() + "\n"


def _settings(settings: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"`{key}` {_plain(text)}" for key, text in settings)


def _plain(text: str) -> str:
    return text.replace("|", r"\|").replace("*", r"\*").replace("_", r"\_")


if __name__ == "__main__":
    PAGE.write_text(page(sections()), encoding="utf-8")
