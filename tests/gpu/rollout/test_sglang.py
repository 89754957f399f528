"""SGLang itself as an engine. SPMD_RL_SGLANG names its interpreter or its folder of packages."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.shapes import random_weights, write_config
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.proof.digest import digest
from tests.engine_suite import EngineCase, EngineSuite, put

PYTHON = os.environ.get("SPMD_RL_SGLANG", "/tmp/sgl" if Path("/tmp/sgl/sglang").is_dir() else "")
DEVICE = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(
    not PYTHON and importlib.util.find_spec("sglang") is None,
    reason="needs SGLang: SPMD_RL_SGLANG names its interpreter or folder",
)


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    """Nothing: this replaces the fixture of the folder, because SGLang has its own attention."""


def decode(tokens: tuple[int, ...]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    folder = tmp_path_factory.mktemp("model")
    spec = write_config("0.6B", folder)
    options: dict[str, Any] = {
        "attention_backend": "triton",
        "cuda_graph_max_bs_decode": 16,
        "max_total_tokens": 32768,  # other processes have some of the GPU
    }
    cfg = SglangEngineConfig(python=PYTHON, options=options, max_batch=32)
    engine = build(cfg, str(folder), DEVICE, decode)

    def advance(steps: int) -> None:
        engine.step()

    def weights(seed: int) -> dict[str, torch.Tensor]:
        return {name: one.to(torch.bfloat16) for name, one in random_weights(spec, seed)}

    yield EngineCase(
        engine,
        weights(0),
        weights(1),
        spec.vocab_size,
        decode,
        advance,
        sleeps_weights=True,
        exact=False,
        num_tokens=400,
    )
    engine.close()


class TestSglang(EngineSuite):
    @pytest.fixture
    def case(self, child: EngineCase) -> EngineCase:
        child.engine.abort()
        child.engine.wake()
        child.engine.sink().open()
        return child


def test_a_flipped_byte_in_a_parameter_is_seen(child: EngineCase) -> None:
    """The digests are those of the child's parameters, so a wrong bit in the push shows."""
    child.engine.wake()
    wrong = {name: tensor.clone() for name, tensor in child.weights.items()}
    name = next(one for one in wrong if one.endswith("k_proj.weight"))
    wrong[name].view(torch.uint8).view(-1)[3] ^= 1
    with pytest.raises(AssertionError):
        push_as(child, wrong)
    child.push(9)


def push_as(case: EngineCase, sent: dict[str, torch.Tensor]) -> None:
    """Push `sent`, and compare with the digests of the case's weights."""
    sink = case.engine.sink()
    sink.open()
    put(sink, sent)
    held = {name: value for (name, _), value in sink.digest().items()}
    assert held == digest(LocalTensors.whole(dict(case.weights)))


def test_memory_comes_back_and_greedy_tokens_are_the_same(child: EngineCase) -> None:
    engine = child.engine
    assert isinstance(engine, SglangEngine)
    child.engine.wake()
    child.push(1)
    requests = [child.request(uid) for uid in range(8)]
    before = child.finish(*requests)
    gone = []
    for _ in range(5):  # other processes may take and give memory meanwhile
        free = torch.cuda.mem_get_info(DEVICE)[0]
        engine.sleep()
        gone.append(torch.cuda.mem_get_info(DEVICE)[0] - free)
        engine.wake()
        child.push(1)
    assert statistics.median(gone) > 2**30
    after = child.finish(*requests)
    assert all(np.array_equal(after[key].tokens, before[key].tokens) for key in before)
