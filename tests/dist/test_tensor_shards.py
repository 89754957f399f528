"""Matrices over 1, 2 and 4 gloo ranks of FSDP2 (axis tp): the same bits of log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.tensor_ranks import SPLITS
from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder

pytestmark = pytest.mark.dist

Report = dict[str, Any]


def with_even_sizes(folder: Path) -> Path:
    """Have a model heads and hidden units that four ranks can share."""
    path = folder / "config.json"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 56}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    dense = with_even_sizes(write_model_folder(work / "dense"))
    out = work / "4.json"
    return torchrun("tensor_ranks.py", 4, out, str(dense), str(out))


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_log_probs_have_the_bits_of_a_rank_with_whole_matrices(split: str, report: Report) -> None:
    assert report["dense"][split] == report["dense"]["tp 1"]
