"""The settings of examples/hybrids fit the GPUs that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shapes import write_config
from spmd_rl.plan import main
from tests.laws.source import ROOT

# settings, ranks, and GiB that CUDA reports of a GPU
SETTINGS = {"0.8B": (1, 79.0), "9B": (4, 139.8), "35B-A3B": (8, 139.8)}


@pytest.mark.parametrize("size", SETTINGS)
def test_the_plan_finds_room(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, gib = SETTINGS[size]
    spec = write_config(f"3.5-{size}", tmp_path)
    words = ["grpo", "--config", str(ROOT / f"examples/hybrids/{size}.toml"), f"--model={tmp_path}"]
    assert main([*words, f"--nproc={ranks}", f"--gpu-gib={gib}"]) == 0
    out = capsys.readouterr().out
    assert f"fits in {gib:g} GiB" in out and f"{spec.num_parameters:,} parameters" in out


def test_states_are_counted(tmp_path: Path) -> None:
    """Of 24 layers: 32 states of 128 x 128 in fp32, and three rows of 8,192 in bfloat16."""
    spec = write_config("3.5-9B", tmp_path)
    assert spec.state_bytes(2) == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert spec.has_states
