"""A model folder with random weights that speaks in chat messages, and its engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.serve.served_model import ServedModel

LIKE = Path(__file__).parents[3] / "examples/environments/model"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_folder(path, LIKE, random_weights(read_spec(LIKE), 3))
    return path


@pytest.fixture
def new_engine(folder: Path) -> Callable[..., NativeEngine]:
    def build(**options: object) -> NativeEngine:
        tokenizer = load_tokenizer(folder)
        cfg = NativeEngineConfig(**options)  # type: ignore[arg-type]
        return ServedModel.find(folder).engine(
            cfg, torch.device("cpu"), lambda ids: tokenizer.decode(list(ids))
        )

    return build
