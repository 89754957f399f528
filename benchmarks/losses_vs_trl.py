"""Losses and gradients beside TRL's own code, on the same tokens, masks, advantages and log-probs.

TRL runs in an interpreter of its own, since its packages do not fit beside the tests':

    python3.11 -m venv trl
    trl/bin/pip install torch==2.13.0 numpy trl==1.16.0 transformers==5.17.0
    python -m benchmarks.losses_vs_trl --python trl/bin/python [--save]

Groups and answers are ragged, tokens are masked within answers, and both sides take several
micro-batches. Rows without a bar show how far two definitions are apart that differ on purpose.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.grpo_step.work import Size, write_model
from benchmarks.peer import Peer
from benchmarks.record import finish, measured
from benchmarks.table import Row
from benchmarks.trl_losses import given, whole

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
PACKAGES = ("torch", "numpy")
TINY = Size("0.02", 32, 48, 2, 8)
ON_GIVEN_NUMBERS = {
    "policy losses": given.policy_rows,
    "advantages": given.advantage_rows,
    "DPO losses": given.dpo_rows,
    "reward model losses": given.reward_rows,
    "distillation losses": given.distill_rows,
    "penalties on long answers": given.overlong_rows,
}


def compare(trl: Peer, folder: Path) -> Iterator[Row]:
    """Yield the rows of all comparisons, and the largest difference of each kind."""
    for kind, rows in ON_GIVEN_NUMBERS.items():
        yield from with_largest(kind, rows(trl))
    yield from with_largest("gradients of a model", whole.model_rows(trl, folder))


def with_largest(kind: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows, then the largest of those with a bar."""
    values = []
    for row in rows:
        yield row
        values += [row.value] if row.bar is not None else []
    yield measured(f"{kind}: cases", len(values), "")
    yield measured(f"{kind}: largest difference", max(values), "ppm")


def start(python: str, folder: Path) -> Peer:
    """Start TRL's side. Raises: RuntimeError with its output if it does not connect."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [python, "-m", "benchmarks.trl_losses.serve", str(folder)]
    return Peer(command, ENVIRONMENT | {"PYTHONPATH": path}, folder / "trl.log")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="of the environment with TRL")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write_model(TINY, folder)
        with start(options.python, folder) as trl:
            found = trl.ask(kind="versions")
            for row in compare(trl, folder):
                print(f"{row.what}: {row.value} {'' if row.holds else row.holds}", flush=True)
                rows.append(row)
    versions = {"trl": found["trl"], "transformers": found["transformers"]}
    return finish(__file__, PACKAGES, rows, save=options.save, **versions)


if __name__ == "__main__":
    sys.exit(main())
