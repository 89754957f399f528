"""The folder of a file's runs on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmd_rl.kernels.attention.flash import flash_supports
from tests.gpu.recipes.runs import HEAD_DIM, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not flash_supports(HEAD_DIM, torch.bfloat16, torch.device("cuda")):
        pytest.skip("no bits are promised but by FlashAttention-4 on a Hopper GPU")
    folder = tmp_path_factory.mktemp("runs")
    write_model(folder / "model")
    return folder
