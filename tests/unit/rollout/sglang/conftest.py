"""SGLang engines whose child runs the fake SGLang of tests/fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from tests.dist.train_case import write_model_folder
from tests.engine_suite import EngineCase
from tests.fakes.sglang_child import write_site

CPU = torch.device("cpu")
DEADLINE_S = 300.0  # a last resort on a busy machine


def decode(tokens: tuple[int, ...]) -> str:
    """A text of one letter a token."""
    return "".join(chr(ord("0") + token) for token in tokens)


@dataclass
class SglangCase(EngineCase):
    engine: SglangEngine


def grant(engine: SglangEngine, steps: int) -> None:
    """Let the fake scheduler run so many more steps; -1 lets it run freely."""
    engine.client.start_call("fake_grant", steps=steps)
    engine.client.finish_call("fake_grant", DEADLINE_S)


def new_sglang_case(folder: Path, site: Path, **options: Any) -> SglangCase:
    """An engine of the model in `folder`; keywords are options of the fake SGLang."""
    spec = read_spec(folder)
    cfg = SglangEngineConfig(
        python=str(write_site(site)),
        options=options,
        slab_bytes=1 << 13,
        max_batch=16,
        answer_deadline_s=DEADLINE_S,
    )
    engine = build(cfg, str(folder), CPU, decode)

    def advance(steps: int) -> None:
        grant(engine, steps)
        engine.step()

    def release() -> None:
        grant(engine, -1)

    return SglangCase(
        engine=engine,
        weights=dict(random_weights(spec, 0)),
        other_weights=dict(random_weights(spec, 1)),
        vocab_size=spec.vocab_size,
        decode=decode,
        advance=advance,
        release=release,
        hold=lambda: grant(engine, 0),
        sleeps_weights=True,
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(tmp_path_factory.mktemp("site"))


def built(folder: Path, site: Path, **cfg: Any) -> SglangEngine:
    """Build an engine; keywords are those of the config."""
    settings = {"python": str(site), "slab_bytes": 1 << 13, "answer_deadline_s": DEADLINE_S}
    return build(SglangEngineConfig(**settings | cfg), str(folder), CPU, decode)


@pytest.fixture
def new_engine(folder: Path, site: Path) -> Iterator[Callable[..., SglangEngine]]:
    """Build engines, which end after the test."""
    engines: list[SglangEngine] = []

    def new(**cfg: Any) -> SglangEngine:
        engines.append(built(folder, site, **cfg))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()
