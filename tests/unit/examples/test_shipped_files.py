"""The data of each example is what its generator makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FILES = {
    "arithmetic": "train eval warmup pairs eval_pairs",
    "calculator": "train warmup",
    "math": "train warmup eval_seen eval_new model/config.json",
    "shop": "train eval",
    "search": "corpus train eval warmup model/tokenizer.json",
}


@pytest.mark.parametrize("example", FILES)
def test_the_shipped_files_are_the_generators(tmp_path: Path, example: str) -> None:
    command = [sys.executable, "-m", f"examples.{example}.generate", "--out", str(tmp_path)]
    subprocess.run(command, cwd=EXAMPLES.parent, check=True)
    for name in FILES[example].split():
        file = name if name.endswith(".json") else f"{name}.jsonl"
        assert (tmp_path / file).read_bytes() == (EXAMPLES / example / file).read_bytes(), file
