"""Prompts from files of a million records: time to the first batch, memory, and resuming.

A .jsonl and a .parquet file are made in a temporary folder. Two fresh processes read each of them.
The first opens it, takes batches, saves its state in between, and takes more. The second resumes
from that state, and must take the same prompts. Time is from before the file is opened until the
first batch is tokenised. Resident memory is the process's peak, with Python and all libraries.

    python -m benchmarks.large_data [--save] [--records 1000000]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import counted, finish, measured
from benchmarks.table import Row

MODEL = Path(__file__).parents[1] / "examples/arithmetic/model"
BATCH, BATCHES, CONTEXT = 128, 20, 4096
BAR_S, BAR_MIB = 5.0, 1024.0
ROWS = 65_536  # of a row group, as writers choose


def records(num: int) -> Iterator[dict[str, Any]]:
    """Yield records of about 300 bytes as JSON, each of its own."""
    for number in range(num):
        words = hashlib.sha256(str(number).encode()).hexdigest()
        prompt = f"Problem {number}: {words} {words[::-1]} {words} What is {number} + 1?"
        yield {"prompt": prompt, "answer": str(number + 1), "level": number % 5}


def write_files(folder: Path, num: int) -> list[Path]:
    """Write the records as .jsonl and as .parquet, without holding them all."""
    import pyarrow
    from pyarrow import parquet

    paths = [folder / "train.jsonl", folder / "train.parquet"]
    schema = pyarrow.schema(
        [("prompt", pyarrow.string()), ("answer", pyarrow.string()), ("level", pyarrow.int64())]
    )
    rows = []
    with paths[0].open("w") as lines, parquet.ParquetWriter(paths[1], schema) as table:
        for number, record in enumerate(records(num), start=1):
            lines.write(json.dumps(record) + "\n")
            rows.append(record)
            if len(rows) == ROWS or number == num:
                table.write_table(pyarrow.Table.from_pylist(rows, schema))
                rows.clear()
    return paths


def write_model(folder: Path) -> None:
    """Write the example's model, with a context in which these prompts have room."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))


def read(path: Path, state: Path) -> dict[str, Any]:
    """Take batches, in a process of its own; resume from `state` if that file exists."""
    from spmd_rl.data.prompts import PromptConfig, Prompts
    from spmd_rl.model.tokenizer import load_tokenizer

    tokenizer, before = load_tokenizer(str(path.with_name("model"))), memory_mib("VmRSS")
    began = time.perf_counter()
    prompts = Prompts(str(path), PromptConfig(), tokenizer)
    resumes = state.is_file()
    if resumes:
        prompts.restore(json.loads(state.read_text()))
    taken = prompts.take(BATCH)
    seconds = time.perf_counter() - began
    if not resumes:
        for _ in range(BATCHES):
            prompts.take(BATCH)
        began = time.perf_counter()
        state.write_text(json.dumps(prompts.state()))
        saving = time.perf_counter() - began
        taken = prompts.take(BATCH)
    return {
        "seconds": seconds,
        "saving": 0.0 if resumes else saving,
        "before": before,
        "peak": memory_mib("VmHWM"),
        "drawn": [[prompt.uid, prompt.text, prompt.answer] for prompt in taken],
    }


def memory_mib(field: str) -> float:
    """Return a field of this process's memory, such as VmRSS, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")


def in_fresh_process(path: Path, state: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.large_data", "--read", str(path), str(state)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return found


def measure(path: Path, num: int) -> Iterator[Row]:
    state = path.with_name(f"{path.name}.state")
    first, resumed = in_fresh_process(path, state), in_fresh_process(path, state)
    name = f"{num:,} records, {path.suffix}"
    yield measured(f"{name}: size of the file", path.stat().st_size / 2**20, "MiB")
    yield measured(f"{name}: first batch", first["seconds"], "s", at_most=BAR_S)
    yield measured(f"{name}: first batch of a resumed run", resumed["seconds"], "s", at_most=BAR_S)
    yield measured(f"{name}: first state for a checkpoint", first["saving"], "s")
    peak = max(first["peak"], resumed["peak"])
    yield measured(f"{name}: peak of resident memory", peak, "MiB", at_most=BAR_MIB)
    yield measured(f"{name}: resident memory before opening", first["before"], "MiB")
    same = [one == other for one, other in zip(first["drawn"], resumed["drawn"], strict=True)]
    yield counted(f"{name}: prompts after resuming that are the same", same)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--read", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(*options.read)))
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="large-data-") as folder:
        write_model(Path(folder) / "model")
        for path in write_files(Path(folder), options.records):
            rows += measure(path, options.records)
    return finish(__file__, ("numpy", "pyarrow", "transformers"), rows, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
