"""The behaviour of every engine, on CPUs: the native one, SGLang's with a fake scheduler, and the
plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl.model.foreign.weights import foreign_weights
from spmd_rl.model.hf import random_weights
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.native.build import build as build_native
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.plain.config import PlainEngineConfig
from spmd_rl.rollout.plain.engine import PlainEngine
from tests.dist.train_case import write_model_folder
from tests.engine_suite import EngineCase, EngineSuite
from tests.foreign_folders import write_foreign_folder
from tests.unit.rollout.sglang.conftest import CPU, SglangCase, decode, new_sglang_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


class TestNative(EngineSuite):
    @pytest.fixture
    def case(self, folder: Path) -> EngineCase:
        spec = read_spec(folder)
        cfg = NativeEngineConfig(max_batch=16, max_step_tokens=64)
        engine = build_native(cfg, str(folder), CPU, decode)

        def advance(steps: int) -> None:
            for _ in range(steps):
                engine.step()

        return EngineCase(
            engine,
            dict(random_weights(spec, 0)),
            dict(random_weights(spec, 1)),
            spec.vocab_size,
            decode,
            advance,
        )


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_foreign_folder(tmp_path_factory.mktemp("foreign"))


class TestPlain(EngineSuite):
    @pytest.fixture
    def case(self, foreign: str) -> EngineCase:
        cfg = PlainEngineConfig(max_batch=16, load_weights=False)
        engine = PlainEngine(cfg, foreign, CPU, decode)

        def advance(steps: int) -> None:
            for _ in range(steps):
                engine.step()

        first, other = (dict(foreign_weights(foreign, seed)) for seed in (0, 1))
        return EngineCase(engine, first, other, 104, decode, advance)


@pytest.fixture(scope="module")
def child(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangCase]:
    """One child for all tests, because its torch takes seconds to import."""
    case = new_sglang_case(folder, tmp_path_factory.mktemp("site"), fake_steps=0)
    yield case
    case.engine.close()


class TestSglang(EngineSuite):
    @pytest.fixture
    def case(self, child: SglangCase) -> SglangCase:
        """The engine as after its start: idle, awake, and without weights of a known version."""
        child.engine.abort()
        child.engine.wake()
        child.engine.sink().open()
        child.hold()
        return child
