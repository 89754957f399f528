"""`spmd-rl report`: write the page of a run, or compare several runs side by side."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.report.build import gather, write_report

USAGE = """\
usage: spmd-rl report RUN [RUN ...] [--out FILE]

Write a page with the curves, samples and timeline of a run to RUN/report.html. With several runs,
write compare.html into the folder that holds the first run's folder (runs/compare.html for runs/a),
and print where they differ and how they ended.

  --out FILE    write the page to this file instead"""


def main(words: list[str]) -> int:
    """Write the page and print its path; with several runs, print their comparison too."""
    words, out = _without_out(words)
    if not words or any(word.startswith("-") for word in words):
        print(USAGE)
        return 0 if {"-h", "--help"} & set(words) else 2
    runs = [Path(word) for word in words]
    try:
        page = write_report(runs, out)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written ({error}): name another file with --out"
        ) from None
    if len(runs) > 1:
        from spmd_rl.report.verdicts.comparison import print_comparison

        print_comparison(gather(runs, small=True))
    print(page)
    return 0


def _without_out(words: list[str]) -> tuple[list[str], Path | None]:
    """Return the words without `--out FILE`, and the file if there is one."""
    if "--out" not in words[:-1]:
        return words, None
    at = words.index("--out")
    return words[:at] + words[at + 2 :], Path(words[at + 1])
