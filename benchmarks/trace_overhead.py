"""Cost of recording spans, as a share of the processor time of the demo's step, all processes.

    python -m benchmarks.trace_overhead --save

Runs of two lengths give the processor time and the spans of a step. Recording and writing the same
number of spans, equally often, is timed by itself, because the difference between runs with and
without spans is below their noise.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import finish, measured
from spmd_rl.observe.timeline import read_spans, trace_files
from spmd_rl.observe.trace import Trace

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
    "run",
]
DEMO = [
    "examples/arithmetic/recipe.py",
    "--config=examples/arithmetic/demo.toml",
    "--nproc=2",
    "--warmup_steps=2",
]
SHORT, LONG = 10, 40
SPANS_A_FLUSH = 8
FLUSHES = 4000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (short_s, few), (long_s, many) = (run(folder, steps) for steps in (SHORT, LONG))
        step_s, num_spans = (long_s - short_s) / (LONG - SHORT), (many - few) / (LONG - SHORT)
        span_s = cost_of_a_span(folder)
    rows = [
        measured("processor time of a demo step, all processes", 1e3 * step_s, "ms"),
        measured("spans of a demo step, all processes", num_spans, "spans"),
        measured("recording and writing one span", 1e6 * span_s, "us"),
        measured(
            "recording, of the step's processor time",
            100 * num_spans * span_s / step_s,
            "%",
            at_most=1.0,
        ),
    ]
    return finish(__file__, ("torch", "msgspec"), rows, save=options.save)


def run(folder: Path, steps: int) -> tuple[float, int]:
    """Return the processor seconds of a whole run, and the number of its spans."""
    before = used_s()
    words = [
        f"--steps={steps}",
        "--run.save_every=0",
        f"--run.folder={folder}",
        f"--run.name={steps}",
    ]
    subprocess.run([*COMMAND, *DEMO, *words], check=True, stdout=subprocess.DEVNULL)
    files = trace_files(folder / str(steps))
    return used_s() - before, sum(
        span is not None for path in files for _, span in read_spans(path)
    )


def used_s() -> float:
    """Return the processor seconds of all children that have ended, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cost_of_a_span(folder: Path) -> float:
    """Return the processor seconds of a span, with a flush to the file after every few spans."""
    trace = Trace(folder / "cost", "rank 0", rank=0)
    began = time.process_time()
    for call in range(FLUSHES):
        for _ in range(SPANS_A_FLUSH):
            with trace.span("trainer.train_step", role="trainer", phase="train", call=call):
                pass
        trace.flush()
    cost_s = (time.process_time() - began) / (FLUSHES * SPANS_A_FLUSH)
    trace.close()
    return cost_s


if __name__ == "__main__":
    sys.exit(main())
