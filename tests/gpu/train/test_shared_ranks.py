"""Sequences, and parts of a batch, over 2 ranks: the bits of one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder
from tests.gpu.train.conftest import SIZES


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model_folder(tmp_path_factory.mktemp("shared"))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES))
    out = folder / "2.json"
    words = str(folder), str(out)
    return torchrun("train/shared_ranks.py", 2, out, *words, room="gpu", timeout_s=280)


@pytest.mark.parametrize("split", ["two", "cp 2"])
def test_log_probs_have_the_bits_of_one_gpu(split: str, report: Any) -> None:
    assert report["first"][split] == report["first"]["one"]


def test_weights_of_a_fixed_number_of_parts_have_the_bits_of_one_gpu(report: Any) -> None:
    if not report["state"]:
        pytest.skip("no step is deterministic: it needs FlashAttention-4")
    assert report["state"]["two"] == report["state"]["one"]
