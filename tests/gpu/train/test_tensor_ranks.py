"""Matrices over 2 GPUs: the log-probs of one GPU, bit for bit, and its gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.dist.torchrun import torchrun
from tests.dist.train_case import write_model_folder
from tests.gpu.train.conftest import SIZES

VOCAB = 509  # whose parts are not alike


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tensors"))


@pytest.fixture(scope="module")
def report(folder: Path) -> Any:
    file = folder / "config.json"
    sizes = SIZES | {"vocab_size": VOCAB}
    file.write_text(json.dumps(json.loads(file.read_text()) | sizes))
    out = folder / "2.json"
    return torchrun(
        "train/tensor_ranks.py", 2, out, str(folder), str(out), room="gpu", timeout_s=400
    )


def test_log_probs_have_the_bits_of_one_gpu(report: Any) -> None:
    assert report["first"]["tp 2"] == report["first"]["one"]
    assert report["top"]["tp 2"] == report["top"]["one"]


def test_one_sum_has_other_bits(report: Any) -> None:
    assert report["first"]["one sum"] != report["first"]["one"]


@pytest.mark.parametrize("backend", ["slopes", "cheap", "all", "moments", "master"])
def test_gradients_are_near_those_of_one_gpu(backend: str, folder: Path, report: Any) -> None:
    assert report["alike"][f"tp 2, {backend}"]
    alone, shared = (
        load_file(folder / f"{split}, {backend}.safetensors") for split in ("one", "tp 2")
    )
    for name, expected in alone.items():
        error = (shared[name] - expected).norm() / expected.norm()
        assert error < 0.02, name


def test_entropies_and_candidates_have_gradients(report: Any) -> None:
    for alone, shared in zip(report["scores"]["one"], report["scores"]["tp 2"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert shared[name] == pytest.approx(alone[name], rel=0.02)
