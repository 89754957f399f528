"""Products from a ring have the bits of products of a tile, at edges and in graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import silu_mul
from spmd_rl.kernels.linear import dispatch
from spmd_rl.kernels.linear.dispatch import own_matmul_into
from spmd_rl.kernels.linear.tiles import (
    GATED_RINGS,
    REFERENCE,
    RINGS,
    RINGS_OF,
    Ring,
    Share,
    choose_share,
)
from tests.gpu.kernels.products import shapes

if torch.cuda.is_available():
    from spmd_rl.kernels.linear.triton_gemm import matmul_into

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(not HOPPER, reason="rings need wgmma, which Hopper alone has")
SHARED = [(n, k) for n, k in shapes() if any(choose_share(m, n, k) for m in (1, 64, 128, 256))]


def found(table: dict[int, tuple[tuple[int, Ring], ...]]) -> list[Ring]:
    return sorted({ring for row in table.values() for _, ring in row})


def shares(gated: bool = False) -> list[Share]:
    """Return shares for few and many rows of x and of the weight, and one, two and four blocks."""
    high = 9728 if gated else 24576
    few = ((1, 2560), (1, high), (16, 4096), (32, 2560), (64, 2560), (64, 3072), (64, high))
    found = [choose_share(m, n, 16384, gated) for m, n in (*few, (128, 2560), (256, 2560))]
    return list(dict.fromkeys(share for share in found if share is not None))


def tiled(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    out = x.new_empty(len(x), len(weight), dtype=dtype)
    matmul_into(out, x, weight, bias, REFERENCE)
    return out


def poisoned(m: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.full((m + 2, n + 8), float("nan"), device="cuda", dtype=dtype)


def whole(room: Tensor, m: int, n: int) -> Tensor:
    assert bool(room[m:].isnan().all()) and bool(room[:, n:].isnan().all())
    return room[:m, :n]


def ringed(
    ring: Ring,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    gated: bool = False,
) -> Tensor:
    """Multiply into poisoned memory, which must stay poisoned beyond the result."""
    from spmd_rl.kernels.linear.gluon import ring_matmul_into

    m, n = len(x), len(weight) // (2 if gated else 1)
    room = poisoned(m, n, dtype)
    ring_matmul_into(room[:m, :n], x, weight, bias, ring, gated)
    return whole(room, m, n)


@pytest.mark.parametrize("k", [64, 1088, 4096])
@pytest.mark.parametrize("ring", sorted({*found(RINGS), *RINGS_OF.values()}), ids=str)
def test_accumulators_and_rounded(ring: Ring, k: int, rows, unequal) -> None:
    n = 2600
    weight, bias = rows("normal", n, k), rows("normal", 1, n)[0]
    for m in sorted({1, ring.m - 1, ring.m, ring.m + 1, 2 * ring.m + 3}):
        for kind in ("normal", "cancelling"):
            x = rows(kind, m, k)
            assert unequal(ringed(ring, x, weight), tiled(x, weight)) == 0
        rounded = ringed(ring, x, weight, bias, torch.bfloat16)
        assert unequal(rounded, tiled(x, weight, bias, torch.bfloat16)) == 0


@pytest.mark.parametrize("ring", found(GATED_RINGS), ids=str)
def test_gated(ring: Ring, rows, unequal) -> None:
    weight = rows("normal", 2 * 1096, 1088)
    for m in (1, ring.m, 2 * ring.m + 3):
        x = rows("normal", m, 1088) * 0.1
        gate, up = tiled(x, weight, dtype=torch.bfloat16).chunk(2, dim=-1)
        assert (
            unequal(ringed(ring, x, weight, dtype=torch.bfloat16, gated=True), silu_mul(gate, up))
            == 0
        )


@pytest.mark.parametrize("share", shares(), ids=str)
def test_shares(share: Share, rows, unequal) -> None:
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    for n, k in ((min(2600, share.n * share.most_shares), 1088), (share.padded, 64), (1096, 4096)):
        weight, bias = rows("normal", n, k), rows("normal", 1, n)[0]
        for m in (1, share.m - 1, share.m, share.m + 1, 2 * share.m + 3):
            for kind, added in (("normal", None), ("cancelling", None), ("normal", bias)):
                for dtype in (torch.bfloat16, torch.float32):
                    x, room = rows(kind, m, k), poisoned(m, n, dtype)
                    shared_matmul_into(room[:m, :n], x, weight, added, share)
                    assert unequal(whole(room, m, n), tiled(x, weight, added, dtype)) == 0


@pytest.mark.parametrize(("n", "k"), SHARED)
def test_accumulators_of_shares_beside_any_rows(n: int, k: int, rows, unequal_rows) -> None:
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    weight = rows("normal", n, k)

    def product(x: Tensor) -> Tensor:
        share, out = choose_share(len(x), n, k), x.new_empty(len(x), n, dtype=torch.float32)
        if share is None:
            return tiled(x, weight)
        shared_matmul_into(out, x, weight, None, share)
        return out

    assert unequal_rows(product, rows("cancelling", 8192, k)) == 0


@pytest.mark.parametrize("columns", [16, 3176])
def test_shares_that_do_not_cover_a_weight_once_are_refused(columns: int, rows) -> None:
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    x, weight = rows("normal", 8, 64), rows("normal", columns, 64)
    with pytest.raises(ValueError, match=f"132 shares of 24 rows are no {columns}"):
        shared_matmul_into(x.new_empty(8, columns), x, weight, None, Share(8, 24, 64, 4, 2, 1))


def test_what_is_gated_is_rounded(rows) -> None:
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    x, weight, share = rows("normal", 8, 64), rows("normal", 2 * 1096, 64), shares(gated=True)[0]
    with pytest.raises(ValueError, match="a gated product rounds to bfloat16"):
        shared_matmul_into(
            x.new_empty(8, 1096, dtype=torch.float32), x, weight, None, share, gated=True
        )


@pytest.mark.parametrize("share", shares(gated=True), ids=str)
def test_gated_shares(share: Share, rows, unequal) -> None:
    from spmd_rl.kernels.linear.cute import shared_matmul_into

    for n in (1096, share.padded):
        weight = rows("normal", 2 * n, 1088)
        for m in (1, share.m, 2 * share.m + 3):
            x, room = rows("normal", m, 1088) * 0.1, poisoned(m, n, torch.bfloat16)
            shared_matmul_into(room[:m, :n], x, weight, None, share, gated=True)
            gate, up = tiled(x, weight, dtype=torch.bfloat16).chunk(2, dim=-1)
            assert unequal(whole(room, m, n), silu_mul(gate, up)) == 0


@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 2048), (16, 2048), (64, 2048), (64, 4096), (200, 4096)]
)
def test_a_recorded_chain_reads_weights_of_before_and_rows_of_the_kernel_before(
    num_rows: int, width: int, rows, unequal
) -> None:
    """Every product reads what the one before wrote; weights change between replays."""
    weights = [rows("normal", width, width) / width**0.5 for _ in range(16)]
    x, outs = rows("normal", num_rows, width), [rows("normal", num_rows, width) for _ in range(16)]

    def chain() -> None:
        for before, out, weight in zip([x, *outs], outs, weights, strict=False):
            own_matmul_into(out, before, weight, None)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(50):
        x.copy_(torch.randn_like(x))
        for weight in weights:
            weight.mul_(-1.0)
        graph.replay()
        recorded = [out.clone() for out in outs]
        for before, out, weight in zip([x, *recorded], recorded, weights, strict=False):
            assert unequal(out, tiled(before, weight, dtype=torch.bfloat16)) == 0


def test_a_weight_that_is_copied_first_takes_a_tile(
    monkeypatch: pytest.MonkeyPatch, rows, unequal
) -> None:
    x, weight = rows("normal", 8, 4096), rows("normal", 4096, 1024).t()
    from spmd_rl.kernels.linear import gluon

    monkeypatch.delattr(gluon, "ring_matmul_into")
    out = x.new_empty(8, 1024)
    own_matmul_into(out, x, weight, None)
    assert unequal(out, tiled(x, weight, dtype=torch.bfloat16)) == 0
    with pytest.raises(ImportError):
        own_matmul_into(out, x, weight.contiguous(), None)


@pytest.mark.parametrize("gated", [False, True])
def test_without_its_package_a_share_has_a_substitute(
    gated: bool, monkeypatch: pytest.MonkeyPatch, rows, unequal
) -> None:
    x, weight = rows("normal", 64, 4096) * 0.1, rows("normal", 8192, 4096)
    outs = [x.new_empty(64, 4096 if gated else 8192) for _ in range(2)]
    own_matmul_into(outs[0], x, weight, None, gated)
    from spmd_rl.kernels.linear import cute

    monkeypatch.setattr(dispatch, "has_dsl", lambda: False)
    monkeypatch.delattr(cute, "shared_matmul_into")
    own_matmul_into(outs[1], x, weight, None, gated)
    assert unequal(*outs) == 0


def test_control_another_chain_fails(rows, unequal) -> None:
    x, weight = rows("normal", 8, 4096), rows("normal", 2600, 4096)
    ring = Ring(8, 32, 512, 4)
    halves = [
        ringed(ring, *(t[:, part].contiguous() for t in (x, weight)))
        for part in (slice(2048), slice(2048, 4096))
    ]
    assert unequal(halves[0] + halves[1], tiled(x, weight)) > 1000
