"""Sums of gradients that do not depend on how parts are dealt to ranks. Pure, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.runtime.neighbour_sums import sum_neighbours
from spmd_rl.mesh.split import RoleSplit, plan_split
from spmd_rl.train.config import OptimizerConfig, TrainerConfig
from spmd_rl.train.fsdp2.accumulation import NeighbourSums
from spmd_rl.train.fsdp2.axes import check_axes
from spmd_rl.train.megatron.config import MegatronConfig
from tests.specs import dense_spec

DENSE = dense_spec("qwen3", vocab=50, hidden=32, inner=20, layers=2, heads=(4, 2, 8), positions=64)


def parts(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, generator=generator) for _ in range(count)]


def total(gradients: list[Tensor]) -> Tensor:
    sums = NeighbourSums()
    for one in gradients:
        sums.add({"w": one})
    return sums.total()["w"]


@given(st.integers(0, 4), st.integers(1, 9), st.integers(0, 99))
def test_any_power_of_two_of_ranks_has_the_same_sum(log_ranks: int, steps: int, seed: int) -> None:
    """Of R ranks, each step sums R neighbouring parts, and a rank adds its steps up."""
    ranks = 1 << log_ranks
    count = ranks * steps
    expected = total(parts(count, seed))
    assert torch.equal(expected, sum_neighbours(parts(count, seed)))
    found = parts(count, seed)
    over_ranks = [sum_neighbours(found[step : step + ranks]) for step in range(0, count, ranks)]
    assert torch.equal(total(over_ranks), expected)


def test_parts_in_another_order_have_another_sum() -> None:
    one, two, three, four = parts(4)
    swapped = total([one, three, two, four])
    assert not torch.equal(swapped, total(parts(4)))
    torch.testing.assert_close(swapped, total(parts(4)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"deterministic": False}, "trainer.deterministic|deterministic"),
        ({"optimizer": OptimizerConfig(kind="adamw8bit")}, "moments in 8 bits depend on"),
        ({"backend": MegatronConfig()}, "'fsdp2' with data_parts"),
        ({"data_parts": -1}, "0 .off. or more"),
    ],
)
def test_what_does_not_go_with_parts_is_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        TrainerConfig(**{"deterministic": True, "data_parts": 4} | settings)


def test_ranks_that_cannot_share_the_parts_are_named() -> None:
    cfg = TrainerConfig(deterministic=True, data_parts=12)
    for world, cp in ((1, 1), (2, 1), (4, 1), (12, 1), (4, 2)):
        check_axes(cfg, plan_split({"train": RoleSplit(cp=cp)}, world).train, DENSE)
    for world in (3, 6, 8):
        with pytest.raises(ConfigError, match=f"data_parts = 12: the data is split over {world}"):
            check_axes(cfg, plan_split({"train": RoleSplit()}, world).train, DENSE)
