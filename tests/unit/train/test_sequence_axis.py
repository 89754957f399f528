"""The axis cp of FSDP2 before a run: what it does not go with is named, and what it saves."""

from __future__ import annotations

from typing import Any

import pytest

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.cost.memory import step_sizes
from spmd_rl.train.fsdp2.axes import check_axes
from tests.specs import dense_spec, with_experts

DENSE = dense_spec("qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(8, 4, 8), positions=64)


def check(cfg: TrainerConfig, spec: Any = DENSE, world: int = 4, **axes: int) -> None:
    check_axes(cfg, plan_split({"train": RoleSplit(**axes)}, world).train, spec)


def test_sequences_are_shared_beside_shards_copies_and_experts() -> None:
    for axes in ({"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}):
        check(TrainerConfig(), **axes)
    check(TrainerConfig(), with_experts(DENSE, 6, 2, 20), cp=2, ep=2)
    check(TrainerConfig(), None, cp=4)


def test_heads_that_cannot_be_shared_are_named() -> None:
    with pytest.raises(ConfigError, match=r"train.cp = 3 does not divide the 4 key-value heads"):
        check(TrainerConfig(), world=3, cp=3)
    with pytest.raises(ConfigError, match=r"train.cp = 8 does not divide the 4 key-value heads"):
        check(TrainerConfig(), world=8, cp=8)
    words = r"cp = 4 does not divide the 2 key-value heads that split.train.tp = 2 leaves on a rank"
    with pytest.raises(ConfigError, match=words):
        check(TrainerConfig(), world=8, cp=4, tp=2)
    with pytest.raises(ConfigError, match=r"does not divide the 1 key-value head that split"):
        check(TrainerConfig(), world=8, cp=2, tp=4)


def test_the_loss_that_balances_experts_is_named() -> None:
    cfg = TrainerConfig(router_aux_loss_coef=0.01)
    with pytest.raises(ConfigError, match=r"does not go with trainer.router_aux_loss_coef = 0.01"):
        check(cfg, with_experts(DENSE, 6, 2, 20), cp=2)


def test_an_axis_of_megatron_alone_is_named() -> None:
    with pytest.raises(PlanError, match="pp = 2: FSDP2 has the axes dp, fsdp, cp, tp and ep alone"):
        check(TrainerConfig(), pp=2)


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_ranks_that_share_matrices_exchange_their_own_heads(recompute: Any) -> None:
    """Beside what a rank keeps without the exchange: its output once more, or all that it took."""
    cfg = TrainerConfig(backend=Fsdp2Config(recompute=recompute), max_tokens=4096)
    queries, keys = 8 * 8 // 2, 4 * 8 // 2  # elements of the heads of one of two ranks
    more = {"none": queries, "cheap": 2 * queries + keys, "all": 0}[recompute]
    whole, shared = (
        step_sizes(DENSE, cfg, plan_split({"train": RoleSplit(cp=cp, tp=2)}, 2 * cp).train)
        for cp in (1, 2)
    )
    assert shared.activations.kept - whole.activations.kept == 4096 * 2 * 2 * more
    assert shared.activations.backward > whole.activations.backward
    assert 2 * shared.master == pytest.approx(whole.master, rel=0.01)
