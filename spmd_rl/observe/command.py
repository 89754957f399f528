"""`spmd-rl trace`: write the spans of a run's processes as a file that trace viewers open."""

from __future__ import annotations

from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.observe.timeline import write_chrome

USAGE = "usage: spmd-rl trace RUN [RUN ...]"


def main(words: list[str]) -> int:
    """`spmd-rl trace`: write each run's trace.json."""
    if not words or words[0].startswith("-"):
        print(USAGE)
        return 0 if words and words[0] in ("-h", "--help") else 2
    for run in map(Path, words):
        if not run.is_dir():
            raise ConfigError(f"no run folder at {run}")
        try:
            num_spans = write_chrome(run)
        except OSError as error:
            raise ConfigError(f"trace.json cannot be written: {error}") from None
        print(
            f"{run / 'trace.json'}: {num_spans:,} spans; open it at ui.perfetto.dev or in chrome://tracing"
        )
    return 0
