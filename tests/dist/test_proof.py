"""A process that takes the place of a rank in a gloo connection is detected before it gets data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.torchrun import torchrun

pytestmark = pytest.mark.dist


def test_an_impostor_is_found_out(tmp_path: Path) -> None:
    honest, impostor, in_a_mesh = torchrun(
        "proof_ranks.py", 3, tmp_path / "said.json", str(tmp_path / "said.json")
    )
    assert honest == ""
    assert impostor == "another process has taken the place of rank 2 in a connection to rank 0"
    assert in_a_mesh == impostor
