"""All records of a data file at once."""

from __future__ import annotations

from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord


def read_records(path: str) -> list[DataRecord]:
    records = open_records(path)
    return records.read(range(len(records)))
