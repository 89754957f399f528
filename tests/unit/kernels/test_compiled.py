"""Properties that the contract asks of Hopper code: its instructions, chains and trees of sums.

The launches are the project's own, so kernels have the arguments, tiles and options that they have
on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from torch import Tensor

from spmd_rl.kernels import QkNorm, Rotary
from spmd_rl.kernels.attention import blocked_triton, decode_inputs_triton, merge_states_triton
from spmd_rl.kernels.linear import gluon, tiles, triton_gemm
from spmd_rl.kernels.linear.tiles import (
    CHAINED,
    GATED_RINGS,
    GATED_TILES,
    REFERENCE,
    RINGS,
    RINGS_OF,
    TILES,
    WGMMA_ROWS,
    Ring,
    Tile,
    in_chains,
)
from spmd_rl.kernels.rowwise import activation_triton, norm_triton, rope_triton, row_hash_triton
from spmd_rl.kernels.vocab import (
    decode_outputs_triton,
    filter_triton,
    kept_sets_triton,
    logprob_backward_triton,
    logprob_triton,
    sampling_triton,
)
from spmd_rl.kernels.vocab.kept_words import EncodedRows, KeptRows
from spmd_rl.kernels.vocab.logprob import NUM_VOCAB_SHARDS, VOCAB_CHUNK
from spmd_rl.kernels.vocab.scores import ScoreGradients, Scores
from tests.unit.kernels.compiled import compiled_of, instructions, ptx_of, shuffles, spilled_bytes

BF16 = torch.bfloat16
WARP, WGMMA_K = 32, 16
THREADS_OF_A_ROW = 4  # in what wgmma returns
VOCAB = NUM_VOCAB_SHARDS, VOCAB_CHUNK
PLAIN = sorted({tile for by_width in TILES.values() for _, tile in by_width} | {REFERENCE})
RINGED = sorted(
    {ring for by_width in RINGS.values() for _, ring in by_width} | set(RINGS_OF.values())
)
GATED_RINGED = sorted({ring for by_width in GATED_RINGS.values() for _, ring in by_width})
GATED = sorted({tile for by_width in GATED_TILES.values() for _, tile in by_width})


@pytest.fixture(autouse=True, scope="module")
def compiled_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither use nor leave behind compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def rows(count: int, columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(count, columns, dtype=dtype)


def product(tile: Tile, num_rows: int = 300, k: int = 1024, gated: bool = False) -> str:
    out, weight = rows(num_rows, 4096), rows(8192 if gated else 4096, k)
    return ptx_of(
        triton_gemm._matmul,
        lambda: triton_gemm.matmul_into(out, rows(num_rows, k), weight, None, tile, gated),
    )


def tensor_core(ptx: str) -> dict[str, int]:
    return {
        name: count
        for name, count in instructions(ptx).items()
        if name.startswith(("mma", "wgmma.mma"))
    }


def added(ptx: str) -> dict[str, int]:
    """Return float32 additions outside the tensor cores, and instructions that add in memory."""
    names = ("add.f32", "add.rn.f32", "fma.rn.f32", "red.", "atom.")
    return {name: count for name, count in instructions(ptx).items() if name.startswith(names)}


@pytest.mark.parametrize(
    ("tile", "gated"), [(one, False) for one in PLAIN] + [(one, True) for one in GATED], ids=str
)
def test_a_product_is_one_chain_of_wgmma(tile: Tile, gated: bool) -> None:
    """One instruction for each 16 of K adds to the chain, and nothing is added beside it."""
    ptx = product(tile, gated=gated)
    (name,) = tensor_core(ptx)
    m, n, k, warps, *_, swap = tile
    tall, wide = (n, m) if swap else (m, n)
    assert name.startswith("wgmma.mma_async.sync.aligned.m64n")
    assert name.endswith(f"k{WGMMA_K}.f32.bf16.bf16")
    columns = int(name.partition("m64n")[2].partition("k")[0])
    height = tall // (warps // 4)
    assert (
        tensor_core(ptx)[name]
        == (1 + gated) * height * wide // (WGMMA_ROWS * columns) * k // WGMMA_K
    )
    assert set(added(ptx)) <= ({"add.rn.f32"} if gated else set())  # SiLU's


@pytest.mark.parametrize(
    ("ring", "gated"),
    [(one, False) for one in RINGED] + [(one, True) for one in GATED_RINGED],
    ids=str,
)
def test_a_ring_is_one_chain_of_wgmma(
    monkeypatch: pytest.MonkeyPatch, ring: Ring, gated: bool
) -> None:
    """The weight is the first operand, as the shape of a program's products says."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    out, weight, k = rows(ring.m, 4096), rows(8192 if gated else 4096, 4096), 4096
    ptx = ptx_of(
        gluon._ring_matmul,
        lambda: gluon.ring_matmul_into(out, rows(ring.m, k), weight, None, ring, gated),
    )
    (name,) = tensor_core(ptx)
    assert name == f"wgmma.mma_async.sync.aligned.m64n{ring.m}k{WGMMA_K}.f32.bf16.bf16"
    height = max(ring.n, WGMMA_ROWS) // (ring.warps // 4)
    assert tensor_core(ptx)[name] == (1 + gated) * height // WGMMA_ROWS * ring.k // WGMMA_K
    assert set(added(ptx)) <= ({"add.rn.f32"} if gated else set())


@pytest.mark.parametrize("chains", [2, 4, 8])
@pytest.mark.parametrize(
    "size", [RINGS[8][0][1], RINGS[64][2][1], TILES[16][0][1], CHAINED], ids=str
)
def test_a_sum_of_several_chains_keeps_three_at_most(
    monkeypatch: pytest.MonkeyPatch, size: Ring | Tile, chains: int
) -> None:
    """A thread adds its part of each chain once, and has few registers for what it keeps."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    out, x, weight = rows(size.m, 4096), rows(size.m, 4096), rows(4096, 4096)
    each = max(size.n, WGMMA_ROWS) * size.m // (WARP * size.warps)
    if isinstance(size, Ring):
        ring = in_chains(size, 4096 // chains)
        kernel, launch = gluon._ring_matmul, partial(gluon.ring_matmul_into, ring=ring)
    else:
        tile = in_chains(size, 4096 // chains)
        kernel, launch = triton_gemm._matmul, partial(triton_gemm.matmul_into, tile=tile)
    ptx = ptx_of(kernel, lambda: launch(out, x, weight, None, chains=chains))
    assert added(ptx) == {"add.rn.f32": (chains - 1) * each}
    assert len(tensor_core(ptx)) == 1
    assert spilled_bytes(ptx) <= 4 * each


@triton.jit
def _in_halves(x, weight, out, K: tl.constexpr, TILE: tl.constexpr) -> None:
    column = tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    upper = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K // 2, TILE):
        at = column[:, None] * K + start + column[None, :]
        total = tl.dot(tl.load(x + at), tl.trans(tl.load(weight + at)), total)
        upper = tl.dot(tl.load(x + at + K // 2), tl.trans(tl.load(weight + at + K // 2)), upper)
    tl.store(out + column[:, None] * TILE + column[None, :], total + upper)


def test_a_product_in_halves_is_seen() -> None:
    given = rows(64, 512), rows(64, 512), rows(64, 64, torch.float32)
    assert added(ptx_of(_in_halves, lambda: _in_halves[(1,)](*given, 512, 64)))


def norm(size: int, num_rows: int) -> str:
    return ptx_of(
        norm_triton._forward,
        lambda: norm_triton.add_rms_norm_forward(
            rows(num_rows, size), rows(num_rows, size), rows(1, size)[0], 1e-6
        ),
    )


@pytest.mark.parametrize("size", [64, 128, 1024, 2560, 4096, 5120])
def test_a_norm_sums_along_one_tree(size: int) -> None:
    """A thread's elements, then a warp's threads, then the warps are added, and none fused."""
    ptx = norm(size, 300)
    tile_rows, block = norm_triton.norm_tile(size)
    threads = WARP * norm_triton.NUM_WARPS
    each = tile_rows * block // threads
    across = threads // tile_rows
    lanes = [1 << i for i in reversed(range(min(across, WARP).bit_length() - 1))]
    warps = (
        [1 << i for i in reversed(range((across // WARP).bit_length() - 1))]
        if across > WARP
        else []
    )
    assert shuffles(ptx) == lanes + warps
    # the last one's is epsilon
    assert added(ptx) == {"add.rn.f32": each - 1 + len(lanes + warps) + 1}
    # x to the residual: one rounding, as of float32's sum
    assert instructions(ptx)["add.rn.bf16x2"] == each // 2


def test_another_tree_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = norm(1024, 300)
    monkeypatch.setattr(norm_triton, "NUM_WARPS", 8)
    assert shuffles(norm(1024, 300)) != shuffles(ours)


def test_fused_rounding_is_seen() -> None:
    given = (
        rows(8, 1024),
        None,
        rows(1, 1024)[0],
        rows(8, 1024),
        None,
        torch.zeros(8),
        8,
        1e-6,
        1024,
        1,
        1024,
    )
    ptx = ptx_of(
        norm_triton._forward,
        lambda: norm_triton._forward[(8,)](*given, num_warps=4, launch_pdl=True),
    )
    assert "fma.rn.f32" in added(ptx)


def rope(num_rows: int) -> str:
    q, k = torch.zeros(num_rows, 16, 128, dtype=BF16), torch.zeros(num_rows, 8, 128, dtype=BF16)
    weight, table = rows(1, 128)[0], torch.zeros(4096, 64)
    positions = torch.zeros(num_rows, dtype=torch.int64)
    return ptx_of(
        rope_triton._forward,
        lambda: rope_triton.qk_norm_rope_forward(
            q, k, QkNorm(weight, weight, 1e-6), Rotary(positions, table, table)
        ),
    )


def silu(num_rows: int) -> str:
    gate, up = rows(num_rows, 3072), rows(num_rows, 3072)
    return ptx_of(activation_triton._forward, lambda: activation_triton.silu_mul_forward(gate, up))


def shards(num_rows: int, kept: bool = False) -> str:
    logits, ones = rows(num_rows, 151936, torch.float32), torch.ones(num_rows)
    targets = torch.zeros(num_rows, dtype=torch.int64)
    words = torch.zeros(num_rows, 4748, dtype=torch.int32) if kept else None
    return ptx_of(
        logprob_triton._shard_sums,
        lambda: logprob_triton.logprob_forward(logits, targets, ones, *VOCAB, words),
    )


def draw(num_rows: int) -> str:
    logits, ones = rows(num_rows, 151936, torch.float32), torch.ones(num_rows)
    keys = torch.zeros(num_rows, dtype=torch.int64)
    return ptx_of(
        sampling_triton._draw_and_sum,
        lambda: sampling_triton.gumbel_argmax_and_logprob(logits, ones, keys, keys, None),
    )


def hashes(num_rows: int) -> str:
    return ptx_of(
        row_hash_triton._row_hashes, lambda: row_hash_triton.row_hashes(rows(num_rows, 1024))
    )


def merge(num_rows: int) -> str:
    partial, sums, out = (
        torch.zeros(3 * num_rows, 16, 128),
        torch.zeros(3 * num_rows, 16),
        rows(16 * num_rows, 128),
    )
    ranges = torch.zeros(num_rows, 3, dtype=torch.int64)
    whole = out.view(num_rows, 16, 128)
    return ptx_of(
        merge_states_triton._merge,
        lambda: merge_states_triton.merge_states_gpu(partial, sums, ranges, whole, None),
    )


def launch_attention(num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    q, k = (
        torch.zeros(2, 3, num_rows, dim, dtype=dtype),
        torch.zeros(2, 3, 8 * num_rows, dim, dtype=dtype),
    )
    visible = torch.ones(3, num_rows, dtype=torch.int64)
    return blocked_triton.attend_in_blocks(q, k, k, visible, num_rows, 0.1)


def attention(num_rows: int, dim: int = 128, dtype: torch.dtype = BF16) -> str:
    return ptx_of(blocked_triton._attend, lambda: launch_attention(num_rows, dim, dtype))


OPS: dict[str, Callable[[int], str]] = {
    "norm": lambda count: norm(1024, count),
    "product": lambda count: product(REFERENCE, count),
    "rope": rope,
    "silu": silu,
    "log-prob": shards,
    "draw": draw,
    "hashes": hashes,
    "merge": merge,
    "attention": attention,
}


@pytest.mark.parametrize("op", OPS)
def test_the_code_is_one_for_all_numbers_of_rows(op: str) -> None:
    """Triton may specialise code for 1 and for multiples of 16, so 17 and 48 are compared."""
    codes = {count: OPS[op](count) for count in (1, 17, 48)}
    assert len(set(codes.values())) == 1


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention_in_blocks_adds_in_its_own_order(dim: int) -> None:
    """Tensor cores multiply, weights are added along one tree, and no two ops share a rounding."""
    ptx = attention(48, dim)
    names = tensor_core(ptx)
    assert names
    assert all(
        name.startswith("wgmma") and name.endswith(f"k{WGMMA_K}.f32.bf16.bf16") for name in names
    )
    each = blocked_triton.block_tile(BF16, dim).keys // THREADS_OF_A_ROW
    assert shuffles(ptx)[-4 * 2 :] == [2, 1] * 4  # the greatest and the sum, of two rows a thread
    # the last one's is what came before
    assert added(ptx) == {"add.rn.f32": 2 * (each - 1 + 2 + 1)}


@pytest.mark.parametrize(
    ("capability", "shared_kib"),
    [
        pytest.param(80, 163, marks=pytest.mark.system),
        (86, 99),
        (90, 227),
        pytest.param(120, 99, marks=pytest.mark.system),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("dim", [128, 256])
def test_attention_in_blocks_fits_every_gpu_since_ampere(
    dim: int, dtype: torch.dtype, capability: int, shared_kib: int
) -> None:
    found = compiled_of(
        blocked_triton._attend, lambda: launch_attention(48, dim, dtype), capability
    )
    assert found.metadata.shared <= shared_kib << 10


def test_attention_of_float32_multiplies_without_tensor_cores() -> None:
    assert not tensor_core(attention(48, 64, torch.float32))


@triton.jit
def _specialised(x, count) -> None:
    at = tl.arange(0, 64)
    tl.store(x + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


def test_code_of_its_own_is_seen() -> None:
    one, many = (
        ptx_of(_specialised, partial(_specialised[(1,)], torch.zeros(64), count))
        for count in (1, 17)
    )
    assert one != many


def test_what_frames_a_step_compiles() -> None:
    """The kernels around a decoding step have no arithmetic to check, so they need only compile."""
    ids, one = torch.zeros(40, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    pages = torch.zeros(40, 8, dtype=torch.int32)
    inputs = ptx_of(
        decode_inputs_triton._inputs,
        lambda: decode_inputs_triton.decode_inputs(ids, ids, ids, ids, pages, 128),
    )
    host = torch.zeros(2, 64, dtype=torch.int64), torch.zeros(2, 64)
    outputs = ptx_of(
        decode_outputs_triton._outputs,
        lambda: decode_outputs_triton.decode_outputs(ids, torch.zeros(40), ids, ids, *host, one),
    )
    assert all("griddepcontrol.wait" in ptx for ptx in (inputs, outputs))


def test_sums_over_a_set_are_the_tree_of_all_sums() -> None:
    over_all, over_sets = shards(17), shards(17, kept=True)
    assert shuffles(over_sets) == shuffles(over_all)
    assert added(over_sets) == added(over_all)


@pytest.mark.parametrize("name", ["_gradient", "_shift"])
def test_gradients_over_a_set_read_its_words(name: str) -> None:
    """The words are loaded beside what is loaded without sets, which costs nothing then."""
    logits, ones = rows(17, 151936, torch.float32), torch.ones(17)
    words, norms = torch.zeros(17, 4748, dtype=torch.int32), torch.ones(2, 17)
    targets = torch.zeros(17, dtype=torch.int64)

    def run(words: Tensor | None) -> None:
        if name == "_shift":
            logprob_backward_triton.shift_logits(logits, ones, norms, logits.half(), words)
        else:
            scores, grads = Scores(ones, ones, None), ScoreGradients(ones, ones, None)
            logprob_backward_triton.logprob_backward(
                grads, scores, logits, targets, None, ones, norms, logits, words=words
            )

    kernel = getattr(logprob_backward_triton, name)
    over_all, over_sets = (instructions(ptx_of(kernel, partial(run, one))) for one in (None, words))
    loads = [
        sum(n for one, n in found.items() if one.startswith("ld.global"))
        for found in (over_all, over_sets)
    ]
    assert loads[1] > loads[0]


def test_filters_write_their_sets_as_bits() -> None:
    logits, ones = rows(17, 151936, torch.float32), torch.ones(17)
    kept = KeptRows.empty(ones > 0, 151936)
    filters = None, None, ones * 0.1, kept
    ptx = ptx_of(filter_triton._keep, lambda: filter_triton.filtered(logits, ones, None, *filters))
    assert "fma.rn.f32" not in instructions(ptx)


@pytest.mark.parametrize("name", ["_collect", "_encode", "_decode"])
def test_kept_sets_are_encoded_and_decoded_without_floats(name: str) -> None:
    vocab, rows, cpu = 151936, torch.arange(17), torch.device("cpu")
    kept = KeptRows.empty(rows > 0, vocab)
    out = EncodedRows.empty((2, 17), vocab, cpu)

    def run() -> None:
        if name == "_decode":
            kept_sets_triton.decoded(torch.zeros(99, dtype=torch.uint8), rows, rows + 2, vocab)
        else:
            kept_sets_triton.encode_rows(kept, out, rows[:1])

    ptx = ptx_of(getattr(kept_sets_triton, name), run)
    assert "griddepcontrol.wait" in ptx
    assert not [one for one in instructions(ptx) if "f32" in one]


def test_candidates_round_as_chosen_tokens() -> None:
    """Products are rounded before a maximum is subtracted from them."""
    logits, ids = rows(17, 151936, torch.float32), torch.zeros(17, 20, dtype=torch.int64)
    ones, norms = torch.ones(17), torch.ones(2, 17)
    ptx = ptx_of(
        logprob_triton._candidates,
        lambda: logprob_triton.candidates_forward(logits, ids, ones, norms),
    )
    found = instructions(ptx)
    assert "mul.rn.f32" in found
    assert "fma.rn.f32" not in found


@pytest.mark.parametrize("name", ["_gradient", "_candidate_gradient"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_gradient_in_place_reads_each_distance_before_it_writes(
    name: str, dtype: torch.dtype
) -> None:
    """A program reads its block of what the head kept once, and then stores gradients over it."""
    kept = rows(17, 151936, torch.float16 if dtype == BF16 else dtype)
    targets, ids = torch.zeros(17, dtype=torch.int64), torch.zeros(17, 20, dtype=torch.int64)
    ones, norms, many = torch.ones(17), torch.ones(2, 17), torch.ones(17, 20)
    ptx = ptx_of(
        getattr(logprob_backward_triton, name),
        lambda: logprob_backward_triton.logprob_backward(
            ScoreGradients(ones, ones, many),
            Scores(ones, ones, many),
            kept,
            targets,
            ids,
            ones,
            norms,
            kept.view(dtype),
            is_shifted=True,
        ),
    )
    loads, stores = (
        [place for place, line in enumerate(ptx.splitlines()) if f" {word}.global" in line]
        for word in ("ld", "st")
    )
    assert max(loads) < min(stores)


def test_what_the_head_keeps_compiles() -> None:
    logits, kept = rows(17, 151936, torch.float32), rows(17, 151936, torch.float16)
    ptx = ptx_of(
        logprob_backward_triton._shift,
        lambda: logprob_backward_triton.shift_logits(
            logits, torch.ones(17), torch.ones(2, 17), kept
        ),
    )
    assert "max.f32" in instructions(ptx)


@pytest.mark.parametrize("name", ["_maxima", "_shares", "weigh", "settle", "_keep"])
def test_filters_order_the_same_scores(name: str) -> None:
    """Every kernel rounds a score as a product before it subtracts or adds it."""
    logits, ones = rows(17, 151936, torch.float32), torch.ones(17)
    kernel = getattr(filter_triton, name)
    ptx = ptx_of(
        kernel, lambda: filter_triton.filtered(logits, ones, ones > 0, None, ones * 0.9, ones * 0.1)
    )
    found = instructions(ptx)
    assert "griddepcontrol.wait" in ptx
    assert "mul.rn.f32" in found
    assert "fma.rn.f32" not in found
    assert not [one for one in found if one.startswith(("red.", "atom."))]


def test_a_draw_takes_the_exponentials_of_training() -> None:
    ours, theirs = (instructions(code(17)) for code in (draw, shards))
    assert ours["ex2.approx.f32"] == theirs["ex2.approx.f32"] > 0
    assert ours["sub.rn.f32"] == theirs["sub.rn.f32"] == theirs["ex2.approx.f32"]


def test_the_tiles_fit() -> None:
    """No tile takes more shared memory than a block may have, which a launch would refuse."""
    assert max(
        tile.stages * (tile.m + tile.n) * tile.k * 2 for tile in PLAIN
    ) <= tiles.SHARED_BYTES + (3 << 10)
