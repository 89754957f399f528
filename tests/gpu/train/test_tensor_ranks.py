"""Matrices over 2 GPUs, and sequences over 2 more: the log-probs of one GPU, bit for bit, and its
gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder
from tests.gpu.train.conftest import SIZES
from tests.gpu.train.tensor_ranks import BACKENDS, NUM_RANKS, SHARED

VOCAB = 509  # whose parts are not alike


@pytest.fixture(scope="module", params=list(SHARED))
def split(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, split: str) -> Path:
    """A model with a head of keys for each rank."""
    folder, num_ranks = write_model_folder(tmp_path_factory.mktemp("tensors")), NUM_RANKS[split]
    heads = {"num_attention_heads": 2 * num_ranks, "num_key_value_heads": num_ranks}
    file = folder / "config.json"
    sizes = SIZES | heads | {"vocab_size": VOCAB}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    return folder


@pytest.fixture(scope="module")
def report(folder: Path, split: str) -> Any:
    out = folder / "report.json"
    words = str(folder), split, str(out)
    return torchrun(
        "train/tensor_ranks.py", NUM_RANKS[split], out, *words, room="gpu", timeout_s=400
    )


def test_log_probs_have_the_bits_of_one_gpu(report: Any, split: str) -> None:
    assert report["first"][split] == report["first"]["one"]
    assert report["top"][split] == report["top"]["one"]


def test_one_sum_has_other_bits(report: Any) -> None:
    assert report["first"]["one sum"] != report["first"]["one"]


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_gradients_are_near_those_of_one_gpu(
    backend: str, folder: Path, report: Any, split: str
) -> None:
    if backend == "master" and SHARED[split].cp > 1:
        pytest.skip("master weights of several shards stay awake")
    assert report["alike"][f"{split}, {backend}"]
    alone, shared = (load_file(folder / f"{one}, {backend}.safetensors") for one in ("one", split))
    for name, expected in alone.items():
        error = (shared[name] - expected).norm() / expected.norm()
        assert error < 0.02, name


def test_entropies_and_candidates_have_gradients(report: Any, split: str) -> None:
    for alone, shared in zip(report["scores"]["one"], report["scores"][split], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert shared[name] == pytest.approx(alone[name], rel=0.02)
