"""`spmd-rl report`: write the page of a run, or compare several runs side by side."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.report.build import gather, write_report

USAGE = "usage: spmd-rl report RUN [RUN ...] [--out FILE]"


def main(words: list[str]) -> int:
    """`spmd-rl report`: write the page and say where it is."""
    words, out = list(words), None
    if "--out" in words[:-1]:
        at = words.index("--out")
        out = Path(words.pop(at + 1))
        words.pop(at)
    if not words or any(word.startswith("-") for word in words):
        print(USAGE)
        return 0 if {"-h", "--help"} & set(words) else 2
    runs = [Path(word) for word in words]
    try:
        page = write_report(runs, out)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written ({error}): name another place with --out"
        ) from None
    if len(runs) > 1:
        from spmd_rl.report.comparison import print_comparison

        print_comparison(gather(runs, small=True))
    print(page)
    return 0
