"""Every file of a checkpoint is checked by one of the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.controller.run.checksums import check, checksums
from spmd_rl.errors import SpmdError


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_whichever_file_changed_one_rank_says_so(tmp_path: Path, num_ranks: int) -> None:
    for number in range(4):
        (tmp_path / f"{number}").write_text("as written")
    expected = checksums(tmp_path)
    for rank in range(num_ranks):
        check(tmp_path, expected, rank, num_ranks)
    for number in range(4):
        (tmp_path / f"{number}").write_text("changed")
        errors = []
        for rank in range(num_ranks):
            try:
                check(tmp_path, expected, rank, num_ranks)
            except SpmdError as error:
                errors.append(str(error))
        assert errors == [
            f"{tmp_path / str(number)} is not as it was written: its checksum is another one"
        ]
        (tmp_path / f"{number}").write_text("as written")
