"""Memory of a trainer of adapters in the plan: the base is counted once, in the compute dtype."""

from __future__ import annotations

import pytest

from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import ParameterGroup, TrainerConfig
from spmd_rl.train.cost.memory import fsdp2_memory, step_sizes
from spmd_rl.train.cost.parts import num_adapted
from tests.specs import dense_spec, with_experts

SPEC = dense_spec(
    "qwen3",
    vocab=151936,
    hidden=4096,
    inner=12288,
    layers=36,
    heads=(32, 8, 128),
    positions=40960,
    theta=1e6,
    qk_norm=True,
)
SMALL = dense_spec("qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(4, 2, 8), positions=64)
CONFIG = TrainerConfig(lora=LoraConfig(rank=16), groups=(ParameterGroup("*.lora_B.*"),))
NUM_BASE = 8_190_735_360
# 16 (in + out) of q, k, v, o, gate, up and down, in 36 layers
NUM_ADAPTED = 36 * 16 * (8192 + 2 * 5120 + 8192 + 3 * 16384)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_what_a_trainer_of_adapters_takes(num_shards: int) -> None:
    placement = plan_split({"train": RoleSplit()}, num_shards).train
    found = step_sizes(SPEC, CONFIG, placement)
    layer = (NUM_BASE - 2 * 151936 * 4096 - 4096) // 36
    gathered = 2 * layer + 2 * 151936 * 4096 + 4096 if num_shards > 1 else 0
    assert found.master == NUM_ADAPTED // num_shards * 4
    assert found.moments == NUM_ADAPTED // num_shards * 8
    assert found.grads == NUM_ADAPTED // num_shards * 4
    assert found.gathered == (NUM_ADAPTED + gathered) * 2
    assert found.activations == step_sizes(SPEC, TrainerConfig(), placement).activations
    assert found.reduced_grads == NUM_ADAPTED // num_shards * 4
    base, *rest = fsdp2_memory(SPEC, CONFIG, placement)
    assert (base.tag, base.num_bytes, base.changes) == ("base", NUM_BASE // num_shards * 2, False)
    assert "base" not in {item.tag for item in rest}


def test_adapters_beside_shared_experts_are_no_unit_with_them() -> None:
    placement = plan_split({"train": RoleSplit(ep=2)}, 2).train
    mixture = with_experts(SMALL, 6, 2, 20)
    found = step_sizes(mixture, CONFIG, placement)
    assert found.grads == found.reduced_grads == num_adapted(mixture, CONFIG.lora) // 2 * 4
    assert found.kept_copies == 0
    base = fsdp2_memory(mixture, CONFIG, placement)[0]
    assert base.num_bytes == mixture.num_parameters // 2 * 2
