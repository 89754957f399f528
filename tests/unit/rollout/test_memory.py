"""Memory of an engine, against sizes worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.shapes import MIXTURE, write_config
from spmd_rl.kernels.linear import symm_exchange
from spmd_rl.kernels.moe import symm_gather
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.rollout.kinds import EngineConfig
from spmd_rl.rollout.kv_pages import cache_token_bytes, kv_budget, kv_pages
from spmd_rl.rollout.memory import engine_memory, running_kv_bytes
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from tests.specs import with_experts

TOKEN_8B = 147_456  # 36 layers, 8 key-value heads of 128, bf16: 144 KiB


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return write_config("8B", tmp_path_factory.mktemp("model"))


def test_kv_of_qwen3_8b(spec: ModelSpec) -> None:
    assert cache_token_bytes(spec, 2) == TOKEN_8B


def test_a_budget_of_pages() -> None:
    assert kv_budget(1000, 0.9, 400) == 500
    assert kv_budget(1000, 0.9, 1000) == -100
    for budget, pages in ((500, 12), (-100, 4), (70, 7), (39, 4)):
        assert kv_pages(5, 2, context=7, batch=3, budget_bytes=budget) == pages


def test_keys_and_values_of_what_runs_take_whole_pages(spec: ModelSpec) -> None:
    cfg = NativeEngineConfig(max_batch=64)
    # 1,000 tokens are 8 pages of 128
    assert running_kv_bytes(spec, cfg, 100, 1000) == 64 * 8 * 128 * TOKEN_8B
    assert running_kv_bytes(spec, cfg, 1, 100) == 40960 * TOKEN_8B, "one context at least"
    assert running_kv_bytes(spec, NativeEngineConfig(num_pages=3), 1, 1) == 3 * 128 * TOKEN_8B


def test_an_engine_by_tag(spec: ModelSpec) -> None:
    found = {item.tag: item for item in engine_memory(spec, NativeEngineConfig(), True)}
    assert found["weights"].num_bytes == 2 * 8_190_735_360
    assert {tag: item.kind for tag, item in found.items()} == {
        "weights": "drop",
        "kv": "drop",
        "step": "drop",
    }
    layer = 8192 * 2 * (4 * 4096 + 2 * 48 * 128 + 3 * 12288)
    assert found["step"].num_bytes == layer + 2 * 256 * 151936 * 4
    on_cpu = {item.tag: item for item in engine_memory(spec, NativeEngineConfig(), False)}
    assert on_cpu["step"].num_bytes == 0


def test_a_base_beside_adapters_is_saved_once(spec: ModelSpec) -> None:
    """No push brings it back."""
    lora = LoraConfig(rank=16, targets=("q_proj", "down_proj"))
    found = {item.tag: item for item in engine_memory(spec, NativeEngineConfig(), True, lora)}
    base = found["weights"]
    assert (base.num_bytes, base.kind, base.changes) == (2 * 8_190_735_360, "save", False)
    adapters = 36 * 16 * ((4096 + 4096) + (12288 + 4096)) * 2
    assert (found["adapters"].num_bytes, found["adapters"].kind) == (adapters, "fixed")
    plain = {item.tag for item in engine_memory(spec, NativeEngineConfig(), True)}
    assert found.keys() == plain | {"adapters"}


def test_an_sglang_engine_keeps_its_slab_and_its_childs_context(spec: ModelSpec) -> None:
    found = {item.tag: item for item in engine_memory(spec, SglangEngineConfig(), True)}
    assert found["slab"].kind == found["child"].kind == "fixed"
    assert (found["slab"].num_bytes, found["child"].num_bytes) == (512 << 20, 720 << 20)
    stays = engine_memory(spec, SglangEngineConfig(sleep_weights=False), True)
    assert {item.tag: item.kind for item in stays}["weights"] == "fixed"


def test_ranks_that_share_an_sglang_engine_have_a_part_and_a_communicator(spec: ModelSpec) -> None:
    alone, shared = (
        {
            item.tag: item.num_bytes
            for item in engine_memory(spec, SglangEngineConfig(), True, tp=tp)
        }
        for tp in (1, 2)
    )
    assert 1 < 2 * shared["weights"] / alone["weights"] < 1.001  # each has the norms
    assert shared["child"] - alone["child"] == 420 << 20


def peers(spec: ModelSpec, cfg: EngineConfig, on_gpu: bool = True, **ranks: int) -> list[TagBytes]:
    return [item for item in engine_memory(spec, cfg, on_gpu, **ranks) if item.tag == "peers"]


@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_that_share_a_model_map_two_buffers(spec: ModelSpec, tp: int) -> None:
    native = NativeEngineConfig()
    assert peers(spec, native, tp=tp) == [TagBytes("peers", 2 * 8 << 20, "fixed")]
    assert peers(spec, native) == peers(spec, native, on_gpu=False, tp=tp) == []
    assert peers(spec, NativeEngineConfig(cuda_graphs=False), tp=tp) == []
    assert peers(spec, SglangEngineConfig(), tp=tp) == []


def test_ranks_that_share_experts_map_rows_and_what_these_get(tmp_path: Path) -> None:
    """Of Qwen3-30B-A3B: 8 of the experts for each row of 2,048 in bfloat16."""
    mixture = write_config(MIXTURE, tmp_path)
    (item,) = peers(mixture, NativeEngineConfig(max_batch=256), ep=8)
    rows = 8 * 256
    assert item.num_bytes == rows * (2048 * 2 + 8 * 8 + 8 * 4 + 8 * 2048 * 2)
    assert item.num_bytes == (72 << 20) + (192 << 10)
    (odd,) = peers(mixture, NativeEngineConfig(max_batch=1), ep=2)
    assert odd.num_bytes == 2 * 2048 * 2 + 256 + 256 + 2 * 8 * 2048 * 2  # parts are aligned


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_map_what_is_counted(
    spec: ModelSpec, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    asked: list[int] = []

    def memory(group: Any, num_bytes: int, channels: Any = (0,)) -> Any:
        asked.append(num_bytes)
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        return SimpleNamespace(own=own, table=lambda first: None)

    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: ranks)
    for module in (symm_exchange, symm_gather):
        monkeypatch.setattr(module, "PeerMemory", memory)
    mixture, cfg = with_experts(spec, 16, 4, 1024), NativeEngineConfig(max_batch=3)
    symm_exchange.SymmExchange(group)
    sizes = symm_gather.RowSizes(4096, 4, torch.bfloat16)
    symm_gather.SymmGather(group, 16, cfg.max_batch, sizes)
    counted = [*peers(spec, cfg, tp=ranks), *peers(mixture, cfg, ep=ranks)]
    assert asked == [one.num_bytes for one in counted]


def test_ranks_that_share_experts_have_a_part_of_them_and_all_else(spec: ModelSpec) -> None:
    mixture = with_experts(spec, 16, 4, 1024)
    alone, shared = (
        {
            item.tag: item.num_bytes
            for item in engine_memory(mixture, NativeEngineConfig(), True, ep=ep)
        }
        for ep in (1, 4)
    )
    experts = 2 * 36 * 16 * 3 * 4096 * 1024
    assert alone["weights"] - shared["weights"] == experts * 3 // 4
    sent_and_returned = 2 * 4 * 4096  # a row for each slot
    assert shared["step"] - alone["step"] == 8192 * sent_and_returned * 2
