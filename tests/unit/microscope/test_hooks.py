"""Watching attention whose keys and values go into the cache before it is called, as
FlashAttention's do.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.kernels import KvCache
from spmd_rl.kernels.attention.blocked_batches import PagedBlocks
from spmd_rl.kernels.attention.flash_backend import FlashAttention
from spmd_rl.kernels.moe.router import ExpertRoutes
from spmd_rl.microscope.diagnose.compare import compare
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.taps.points import Point
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.layers.moe_module import MoeMlp
from tests.specs import kv_layers


class PagesOnCpu:
    """In the place of FlashAttention: its layout of the cache, and the CPU's arithmetic."""

    def __init__(
        self,
        table: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        size: int,
    ) -> None:
        self.given, self.page_size = (table, starts, lengths), size

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        heads_per_kv = q.shape[1] // keys.shape[2]
        blocks = PagedBlocks(*self.given, self.page_size, heads_per_kv, keys.device)
        return blocks(q, *(x.flatten(0, 1).transpose(0, 1).contiguous() for x in (keys, values)))


@pytest.fixture(autouse=True)
def _flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spmd_rl.kernels.attention.paged.attention_backend",
        lambda head_dim, dtype, device, split, latent_dim: FlashAttention(head_dim, device, split),
    )
    monkeypatch.setattr(
        "spmd_rl.kernels.attention.flash_backend.flash_of_chunks",
        lambda *given: PagesOnCpu(*given[:4]),
    )


def test_the_cache_has_flashs_layout() -> None:
    cache = KvCache(
        kv_layers(1, 2, 8), num_pages=5, page_size=4, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert cache.data.shape == (1, 2, 5, 4, 2, 8)


def test_engine_and_trainer_agree_in_every_op(engine, trainer, case) -> None:
    comparison = compare(engine(), trainer, case)
    assert comparison.results == ()
    assert {point.op for point in comparison.points} >= {"q", "k", "v", "attention"}


@pytest.mark.parametrize(
    ("fault", "found"), [("rope-bf16", {"q", "k"}), ("norm-order", {"post_norm"})]
)
def test_what_is_put_in_the_place_of_keys_goes_into_the_cache(
    engine, trainer, case, fault: str, found: set
) -> None:
    path = engine()
    plant(fault, path)
    comparison = compare(path, trainer, case)
    assert comparison.patched == "engine"
    assert {one.point.op for one in comparison.results if one.status == "introduced"} == found
    assert comparison.first_introduced is not None
    assert comparison.first_introduced.point == Point(
        *((0, "q") if fault == "rope-bf16" else (1, "post_norm"))
    )


def test_watched_routes_lie_as_kernels_read_them() -> None:
    """Kernels read the weight of a slot by its number, whatever the strides are."""
    layer = Moe(8, 4, 2, 8).module(0)
    assert isinstance(layer, MoeMlp)
    layer.chosen.register_forward_hook(lambda module, args, output: None)
    routes = ExpertRoutes(torch.tensor([[0, 3], [1, 2]]), torch.rand(2, 2))
    watched = layer._watched(routes)
    assert torch.equal(watched.ids, routes.ids) and torch.equal(watched.weights, routes.weights)
    assert watched.ids.is_contiguous() and watched.weights.is_contiguous()
