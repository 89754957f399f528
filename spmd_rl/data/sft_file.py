"""File of supervised data that a run writes, and that a resumed run continues exactly."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import parse_json

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # a link leads to a file that is not the run's


class SftFile:
    """A .jsonl file with a record a line, which `recipes/sft` reads. It is part of a checkpoint.

    A checkpoint keeps the length of the file. A run that continues cuts what was written later, so
    that no line is there twice and none is missing. `num_duplicates` counts the records left out
    because an earlier one has the same prompt and answer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_records = 0
        self.num_duplicates = 0
        self._num_bytes = 0
        self._answers: set[str] = set()  # prompts with answers, as JSON

    def add(self, records: Sequence[dict[str, Any]]) -> None:
        """Write records, each with "prompt" and "answer", but for those that are there already."""
        new = [record for record in records if self._is_new(record)]
        self.num_records += len(new)
        self.num_duplicates += len(records) - len(new)
        content = "".join(json.dumps(record) + "\n" for record in new).encode()
        with os.fdopen(os.open(self.path, _FLAGS, 0o666), "r+b") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(content)
        self._num_bytes += len(content)

    def metrics(self) -> dict[str, float]:
        """Return how many answers the run has written and left out so far."""
        return {
            "rejection/kept_samples": float(self.num_records),
            "rejection/duplicates": float(self.num_duplicates),
        }

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as plain data, once what was written is on the disk."""
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())
        return {"bytes": self._num_bytes, "duplicates": self.num_duplicates}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the records that were there when `state` was taken.

        Raises: DataError when the file is shorter than it was, or a line is damaged.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        self._num_bytes, self.num_duplicates = state["bytes"], state["duplicates"]
        if len(content) < self._num_bytes:
            raise DataError(
                str(self.path),
                f"the file has {len(content)} bytes, but {self._num_bytes} at the checkpoint: "
                "restore it, or start a new run with --run.name",
            )
        lines = content[: self._num_bytes].split(b"\n")[:-1]
        self.num_records = len(lines)
        self._answers = {
            _answer_id(_record(f"{self.path}:{number}", line))
            for number, line in enumerate(lines, start=1)
        }

    def _is_new(self, record: dict[str, Any]) -> bool:
        """Note a record; return whether its prompt had no such answer before."""
        answer_id = _answer_id(record)
        is_new = answer_id not in self._answers
        self._answers.add(answer_id)
        return is_new


def _record(where: str, line: bytes) -> dict[str, Any]:
    record = parse_json(where, line)
    if not isinstance(record, dict) or not {"prompt", "answer"} <= record.keys():
        raise DataError(where, "it is no record with 'prompt' and 'answer': restore the file")
    return record


def _answer_id(record: dict[str, Any]) -> str:
    return json.dumps([record["prompt"], record["answer"]], sort_keys=True)
