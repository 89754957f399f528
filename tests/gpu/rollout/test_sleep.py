"""An engine on a GPU whose weights and pages sleep: its recorded graphs give the same samples."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.errors import SpmdError
from spmd_rl.model.network import CausalLM
from spmd_rl.model.slab_parameters import fill_slab
from spmd_rl.offload.phases import ALL, RoleSleep
from spmd_rl.offload.role_memory import RoleMemory
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from tests.gpu.rollout.graph_case import DEVICE, SPEC, unequal, workload
from tests.samples import Samples, finish

PHASES = {"sync": ("weights",), "rollout": ALL, "train": ()}
NUM_PAGES = 200


def engine_in_slabs(name: str) -> tuple[NativeEngine, CausalLM, RoleMemory]:
    """As the Rollout role builds it, with no weights yet."""
    memory = RoleMemory(RoleSleep(name, PHASES), DEVICE)
    with torch.device("meta"):
        model = CausalLM(SPEC).to(torch.bfloat16).requires_grad_(False)
        model.pack_projections()
    fill_slab(model, lambda num_bytes: memory.slab("weights", "save", num_bytes).bytes)
    cfg = NativeEngineConfig(
        dtype="bfloat16", max_batch=24, page_size=128, max_step_tokens=256, num_pages=NUM_PAGES
    )
    return NativeEngine(model, cfg, DEVICE, memory=memory), model, memory


def push(engine: NativeEngine, model: CausalLM, source: CausalLM, version: int) -> None:
    sink = engine.sink()
    sink.open()
    for parameter, weight in zip(model.parameters(), source.parameters(), strict=True):
        parameter.data.copy_(weight)
    sink.commit(version)


@pytest.mark.alone
def test_saved_weights_and_graphs_outlive_sleep(model: CausalLM, alone: Samples) -> None:
    engine, own, _ = engine_in_slabs("saved")
    push(engine, own, model, 0)
    assert unequal(finish(engine, workload()), alone) == 0
    recorded = engine.stats()["num_graphs"]
    num_bytes = sum(one.nbytes for one in own.parameters()) + engine.stats()["kv_bytes"]
    for _ in range(3):
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free >= 0.99 * num_bytes
        engine.wake()
        assert unequal(finish(engine, workload()), alone) == 0
    assert engine.stats()["num_graphs"] == recorded


def test_dropped_weights_come_with_a_push_before_the_pages(model: CausalLM, alone: Samples) -> None:
    engine, own, memory = engine_in_slabs("dropped")
    memory.drop("weights")
    push(engine, own, model, 0)
    assert unequal(finish(engine, workload()), alone) == 0
    recorded = engine.stats()["num_graphs"]
    engine.sleep()
    engine.wake()
    with pytest.raises(SpmdError, match="weights slept after a push, push again"):
        engine.step()
    engine.sleep()
    engine.wake(("weights",))
    push(engine, own, model, 1)
    engine.wake(("kv",))
    samples = finish(engine, workload())
    assert unequal(samples, alone) == 0
    assert engine.stats()["num_graphs"] == recorded
