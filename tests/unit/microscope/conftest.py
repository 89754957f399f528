"""A tiny model folder with weights that no op leaves as they are, and sequences long enough for
every fault.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spmd_rl.microscope.diagnose.kernel_profile import KernelTrace, traced
from spmd_rl.microscope.replay.case import ReplayCase, ReplaySequence
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import (
    ForwardPass,
    ReferencePass,
    TrainerPass,
    load_model,
)
from spmd_rl.microscope.taps.taps import ProfilerTap
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.config import NativeEngineConfig

CPU = torch.device("cpu")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "arithmetic" / "model"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("like"))


def write_model(folder: Path, **changes: Any) -> Path:
    """Write the model of the example with these changes of its config. No norm or bias is plain."""
    like = folder / "model"
    shutil.copytree(EXAMPLE, like)
    config = json.loads((like / "config.json").read_text()) | {"max_position_embeddings": 256}
    (like / "config.json").write_text(json.dumps(config | changes))
    generator = torch.Generator().manual_seed(2)
    tensors = (
        (name, one + 0.2 * torch.randn(one.shape, generator=generator) if one.ndim == 1 else one)
        for name, one in random_weights(read_spec(like), seed=1)
    )
    save_folder(folder / "hf", like, tensors)
    return folder / "hf"


@pytest.fixture(scope="session")
def case() -> ReplayCase:
    """A shared prompt, a prompt longer than a chunk, a decoded answer beyond two blocks of keys."""
    rng = np.random.default_rng(0)
    stem = rng.integers(2, 100, 60)
    sizes = {"0:0": (9, 4), "0:1": (9, 7), "1:0": (50, 120), "2:0": (17, 1)}
    return ReplayCase(
        tuple(
            ReplaySequence(name, stem[:p], rng.integers(2, 100, r))
            for name, (p, r) in sizes.items()
        )
    )


@pytest.fixture(scope="session")
def engine(folder: Path) -> Callable[[], EnginePass]:
    cfg = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40)
    return lambda: EnginePass(load_model(folder, torch.float32, CPU), cfg)


@pytest.fixture(scope="session")
def trainer(folder: Path) -> TrainerPass:
    return TrainerPass(load_model(folder, torch.float32, CPU), max_tokens=64, logit_rows=16)


@pytest.fixture(scope="session")
def reference(folder: Path) -> ReferencePass:
    return ReferencePass(folder, torch.float32, CPU)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the names of kernels, for which a profiler takes most of an examination's time."""

    def without_profile(forward_pass: ForwardPass, case: ReplayCase) -> KernelTrace:
        tap = ProfilerTap(case.num_rows)
        forward_pass.run(case, tap)
        return traced(tap, {})

    monkeypatch.setattr("spmd_rl.microscope.examine.kernels_of", without_profile)
