"""Fused kernels on a GPU have the bits of the ops that they fuse, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import (
    KvSlots,
    QkNorm,
    Rotary,
    Scores,
    add_rms_norm,
    head_logprobs,
    linear,
    linear_fp32,
    position_keys,
    qk_norm_rope,
    qk_norm_rope_into,
    recomputing,
    rms_norm,
    rope,
    rope_table,
    sample_and_score,
    sample_tokens,
    silu_mul,
    silu_mul_linear,
    stream_bases,
    stream_keys,
    token_logprobs,
    write_kv,
)
from spmd_rl.kernels.low_precision.kv_codes import KvCoding, encode_kv
from tests.gpu.kernels.gradients import gradient

EPS = 1e-6
NUM_TOKENS = 8192
KINDS = ("normal", "wide", "cancelling", "tiny")
FLOATS = (torch.bfloat16, torch.float32)
HEADS = [
    (16, 8, 128),
    (32, 8, 128),
    (14, 2, 64),
    (4, 4, 64),
    (8, 2, 32),
    (6, 2, 96),
    (2, 1, 128),
    (3, 1, 20),
]


class Joint:
    """Queries, keys and values as slices of one projection, with the inputs of `qk_norm_rope`."""

    def __init__(
        self,
        make: Callable[..., Tensor],
        num_tokens: int,
        heads: tuple[int, int, int],
        **kind: object,
    ) -> None:
        num_heads, num_kv_heads, self.dim = heads
        self.widths = [num_heads * self.dim, num_kv_heads * self.dim, num_kv_heads * self.dim]
        self.x = make(
            kind.get("kind", "normal"),
            num_tokens,
            sum(self.widths),
            kind.get("dtype", torch.bfloat16),
        )
        self.weights = [self.x.new_tensor(range(self.dim)).sin_() + shift for shift in (1.0, 0.5)]
        table = rope_table(1.0 / 1e6 ** (torch.arange(0, self.dim, 2) / self.dim), 4096)
        self.cos, self.sin = (part.cuda() for part in table)
        self.positions = torch.arange(num_tokens, device="cuda") * 37 % 4096
        self.rotary = Rotary(self.positions, self.cos, self.sin)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(1, (-1, self.dim)) for part in x.split(self.widths, 1)]

    def norm(self, weights: Sequence[Tensor] = ()) -> QkNorm:
        q_weight, k_weight = weights or self.weights
        return QkNorm(q_weight, k_weight, EPS)

    def fused(self, x: Tensor, positions: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
        q, k, _ = self.parts(x)
        turned = qk_norm_rope(q, k, self.norm(weights), Rotary(positions, self.cos, self.sin))
        return torch.cat([one.flatten(1) for one in turned], 1)

    def apart(self, x: Tensor, positions: Tensor, weights: Sequence[Tensor] = ()) -> Tensor:
        pairs = zip(self.parts(x)[:2], weights or self.weights, strict=True)
        normed = [rms_norm(part.contiguous(), weight, EPS) for part, weight in pairs]
        return torch.cat(
            [rope(one, self.cos[positions], self.sin[positions]).flatten(1) for one in normed], 1
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [64, 100, 1024, 2560, 4096, 5120])
def test_norm_of_a_sum(
    columns: int, kind: str, dtype: torch.dtype, rows, unequal, unequal_rows
) -> None:
    weight, beside = rows("normal", 1, columns, dtype)[0], rows(kind, 1, columns, dtype)
    x = rows(kind, NUM_TOKENS, columns, dtype)

    def op(x: Tensor) -> Tensor:
        return torch.stack(add_rms_norm(x, x * 0.5 + beside, weight, EPS), 1)

    normed, summed = op(x).unbind(1)
    assert unequal(summed, x * 0.5 + beside + x) == 0
    assert unequal(normed, rms_norm(summed, weight, EPS)) == 0
    assert unequal_rows(op, x) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS)
def test_heads(
    heads: tuple[int, int, int], kind: str, dtype: torch.dtype, rows, unequal, unequal_rows
) -> None:
    joint = Joint(rows, 2048, heads, kind=kind, dtype=dtype)
    whole = joint.fused(joint.x, joint.positions)
    assert unequal(whole, joint.apart(joint.x, joint.positions)) == 0
    assert unequal(whole, joint.fused(joint.x, joint.positions.int())) == 0
    q, k, _ = (part.contiguous() for part in joint.parts(joint.x))
    dense = qk_norm_rope(q, k, joint.norm(), joint.rotary)
    assert unequal(torch.cat([one.flatten(1) for one in dense], 1), whole) == 0
    assert (
        unequal_rows(
            lambda x: joint.fused(x, joint.positions[5].expand(len(x)).contiguous()), joint.x
        )
        == 0
    )


@pytest.mark.parametrize("heads", HEADS)
def test_heads_without_norm(heads: tuple[int, int, int], rows, unequal) -> None:
    joint = Joint(rows, 300, heads)
    q, k, _ = joint.parts(joint.x)
    turned = qk_norm_rope(q, k, QkNorm(None, None, EPS), joint.rotary)
    for one, part in zip(turned, (q, k), strict=True):
        assert unequal(one, rope(part, joint.cos[joint.positions], joint.sin[joint.positions])) == 0


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def _gradients(op: Callable[..., Tensor], leaves: list[Tensor], push: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    op(*leaves).backward(push)
    return [gradient(leaf) for leaf in leaves]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("num_tokens", [5, 5000])
@pytest.mark.parametrize("heads", [(16, 8, 128), (6, 2, 96), (3, 1, 20)])
def test_gradients_of_heads(
    heads: tuple[int, int, int], num_tokens: int, dtype: torch.dtype, bound: float, rows
) -> None:
    joint = Joint(rows, num_tokens, heads, dtype=dtype)
    push = torch.randn_like(joint.apart(joint.x, joint.positions))
    for weights in (joint.weights, []):
        found, expected = (
            _gradients(lambda x, *w, op=op: op(x, joint.positions, w), [joint.x, *weights], push)
            for op in (joint.fused, joint.apart)
        )
        for one, other in zip(found, expected, strict=True):
            assert _distance(one, other) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape", [(5, 1024), (5000, 2560), (700, 100)])
def test_gradients_of_a_normed_sum(
    shape: tuple[int, int], dtype: torch.dtype, bound: float, rows
) -> None:
    x, beside, weight = (
        rows("normal", *shape, dtype),
        rows("wide", *shape, dtype) * 2**-10,
        rows("normal", 1, *shape[1:], dtype)[0],
    )
    push = torch.randn(*shape[:1], 2 * shape[1], device="cuda").to(dtype)

    def apart(x: Tensor, beside: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        summed = beside + x
        return rms_norm(summed, weight, EPS), summed

    found, expected = (
        _gradients(lambda *leaves, op=op: torch.cat(op(*leaves), 1), [x, beside, weight], push)
        for op in (lambda x, beside, weight: add_rms_norm(x, beside, weight, EPS), apart)
    )
    for one, other in zip(found, expected, strict=True):
        assert _distance(one, other) < bound


def test_halves_of_a_joint_projection(rows, unequal) -> None:
    both = rows("normal", 257, 2 * 3072)
    gate, up = both.chunk(2, 1)
    assert unequal(silu_mul(gate, up), silu_mul(gate.contiguous(), up.contiguous())) == 0
    push = rows("wide", 257, 3072)
    strided = _gradients(lambda x: silu_mul(*x.chunk(2, 1)), [both], push)[0]
    apart = _gradients(silu_mul, [gate, up], push)
    assert unequal(strided, torch.cat(apart, 1)) == 0


@pytest.mark.parametrize("heads", HEADS)
def test_keys_and_values_go_to_their_slots(heads: tuple[int, int, int], rows, unequal) -> None:
    joint = Joint(rows, 40, heads)
    _, k, v = joint.parts(joint.x)
    cache = torch.full(
        (2, 8, 16, k.shape[1], k.shape[2]), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    slots = torch.randperm(128, device="cuda")[:37]
    slots[[0, 7, 36]] = -1
    expected = cache.clone()
    for pages, new in zip(expected.flatten(1, 2), (k, v), strict=True):
        pages[slots[slots >= 0]] = new[:37][slots >= 0]
    keys, values = cache
    write_kv(keys, values, slots, k, v)
    assert unequal(cache, expected) == 0
    assert int(cache.isnan().any(-1).any(-1).sum()) == 2 * (128 - 34)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("num_tokens", [40, 1500])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_go_to_their_pages(
    heads: tuple[int, int, int], num_tokens: int, normed: bool, rows, unequal
) -> None:
    """Some tokens have no slot, and the last tokens lie beyond all slots."""
    joint = Joint(rows, num_tokens, heads)
    q, k, v = joint.parts(joint.x)
    slots = torch.randperm(2000, device="cuda")[: num_tokens - 3]
    slots[[0, 7, -1]] = -1
    caches = torch.full(
        (2, 2, 125, 16, k.shape[1], k.shape[2]), torch.nan, dtype=torch.bfloat16, device="cuda"
    )
    (apart_keys, apart_values), (fused_keys, fused_values) = caches
    norm = joint.norm() if normed else QkNorm(None, None, EPS)
    turned, keys = qk_norm_rope(q, k, norm, joint.rotary)
    write_kv(apart_keys, apart_values, slots, keys, v)
    into = KvSlots(fused_keys, fused_values, slots)
    assert unequal(qk_norm_rope_into(q, k, v, norm, joint.rotary, into), turned) == 0
    assert unequal(caches[1], caches[0]) == 0
    assert int(caches[1].isnan().all(-1).all(-1).sum()) == 2 * (2000 - num_tokens + 6)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("num_tokens", [40, 1500])
@pytest.mark.parametrize("heads", HEADS)
def test_codes_of_heads_go_to_their_pages(
    heads: tuple[int, int, int], num_tokens: int, normed: bool, rows, unequal
) -> None:
    joint = Joint(rows, num_tokens, heads)
    q, k, v = joint.parts(joint.x)
    slots = torch.randperm(2000, device="cuda")[: num_tokens - 3]
    slots[[0, 7, -1]] = -1
    shape = 2, 125, 16, k.shape[1], k.shape[2]
    apart, fused = (torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    codings = [KvCoding((-8, -9), torch.zeros(2, dtype=torch.int64, device="cuda")) for _ in "ab"]
    norm = joint.norm() if normed else QkNorm(None, None, EPS)
    turned, keys = qk_norm_rope(q, k, norm, joint.rotary)
    write_kv(apart[0], apart[1], slots, keys, v, codings[0])
    into = KvSlots(fused[0], fused[1], slots)
    found = qk_norm_rope_into(q, k, v, norm, joint.rotary, into, codings[1])
    assert unequal(found, turned) == 0
    assert torch.equal(fused, apart)
    used = slots >= 0
    for pages, new, exponent in zip(fused, (keys, v), codings[0].exponents, strict=True):
        codes = encode_kv(new[: len(slots)][used], exponent)
        assert torch.equal(pages.flatten(0, 1)[slots[used]], codes) and codes.any()
    counts = [coding.counts.tolist() for coding in codings]
    assert counts[0] == counts[1] and counts[0][1] > 0
    assert counts[0][0] == 2 * int(used.sum()) * k.shape[1] * k.shape[2]


@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256])
@pytest.mark.parametrize(
    ("half", "k"), [(3072, 1024), (9728, 2560), (12288, 4096), (100, 72), (1536, 520)]
)
def test_gated_product(half: int, k: int, num_rows: int, rows, unequal) -> None:
    weight, x = rows("normal", 2 * half, k), rows("normal", num_rows, k)
    with torch.no_grad():
        gated = silu_mul_linear(x, weight)
    assert unequal(gated, silu_mul(linear(x, weight[:half]), linear(x, weight[half:]))) == 0
    accumulators = linear_fp32(x, weight)
    unrounded = F.silu(accumulators[:, :half]) * accumulators[:, half:]
    assert unequal(unrounded.bfloat16(), gated) > 0.01 * gated.numel()


@pytest.mark.parametrize("num_rows", [1, 16, 64, 256])
def test_kernels_that_overlap_wait_for_each_other(num_rows: int, rows, unequal) -> None:
    """Compare a chain of products and small kernels, alone and in a graph, with paused runs."""
    weights = [rows("normal", 2 * 1024, 512) / 16, rows("normal", 512, 1024) / 8]
    scale, x = rows("normal", 1, 512)[0], rows("normal", num_rows, 512)

    def chain(pause: Callable[[], None]) -> Tensor:
        normed, summed = x, x
        for _ in range(40):
            for op in (
                lambda normed, summed: (silu_mul_linear(normed, weights[0]), summed),
                lambda normed, summed: (linear(normed, weights[1]), summed),
                lambda normed, summed: add_rms_norm(normed, summed, scale, EPS),
            ):
                normed, summed = op(normed, summed)
                pause()
        return normed

    with torch.no_grad():
        expected = chain(torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(lambda: None)
        for _ in range(20):
            assert unequal(chain(lambda: None), expected) == 0
            captured.zero_()
            graph.replay()
            assert unequal(captured, expected) == 0


def test_keys_of_positions_are_those_of_the_host() -> None:
    ids = np.arange(1000) * 123456789
    made = position_keys(
        torch.from_numpy(stream_bases(5, ids, ids)).cuda(), torch.from_numpy(ids).cuda()
    )
    assert made.tolist() == stream_keys(5, ids, ids, ids).tolist()


@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
@pytest.mark.parametrize("vocab", [7, 5003, 151936])
def test_draw_and_score_are_the_two_ops(vocab: int, num_rows: int, rows, unequal) -> None:
    """Replay a graph whose positions advance, with rows of NaN at the end."""
    logits, ids = rows("normal", num_rows + 3, vocab, torch.float32) * 3, np.arange(num_rows + 3)
    logits[num_rows:] = torch.nan
    scale, greedy = (
        torch.linspace(0.3, 2, len(ids), device="cuda"),
        torch.arange(len(ids), device="cuda") % 9 == 4,
    )
    bases, positions = (
        torch.from_numpy(stream_bases(3, ids % 8, ids)).cuda(),
        torch.arange(len(ids), device="cuda"),
    )
    sample_and_score(logits, scale, bases, positions, greedy=greedy)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sample_and_score(logits, scale, bases, positions, greedy=greedy)
        positions += 1
    drawn = []
    for _ in range(3):
        expected = sample_tokens(logits, scale, position_keys(bases, positions), greedy=greedy)
        graph.replay()
        assert torch.equal(tokens[:num_rows], expected[:num_rows])
        assert (
            unequal(logprobs[:num_rows], token_logprobs(logits, tokens, scale)[0][:num_rows]) == 0
        )
        assert bool((tokens >= 0).all() & (tokens < vocab).all())
        drawn.append(tokens.tolist())
    assert drawn[0] != drawn[1]
    plain, scored = sample_and_score(logits, scale, bases, positions)
    assert torch.equal(
        plain[:num_rows], sample_tokens(logits, scale, position_keys(bases, positions))[:num_rows]
    )
    assert unequal(scored[:num_rows], token_logprobs(logits, plain, scale)[0][:num_rows]) == 0
    given = (plain + 1) % vocab
    same, scored = sample_and_score(logits, scale, bases, positions, given=given)
    assert torch.equal(same, given)
    assert unequal(scored[:num_rows], token_logprobs(logits, given, scale)[0][:num_rows]) == 0


def test_padding_of_any_content_is_invisible(rows, unequal) -> None:
    joint, weight = Joint(rows, 64, HEADS[0]), rows("normal", 1, 1024)[0]
    x = rows("normal", 64, 1024)
    whole = joint.fused(joint.x, joint.positions), torch.cat(add_rms_norm(x, x, weight, EPS), 1)
    joint.x[40:], x[40:], joint.positions[40:] = torch.nan, torch.inf, 0
    poisoned = joint.fused(joint.x, joint.positions), torch.cat(add_rms_norm(x, x, weight, EPS), 1)
    for one, other in zip(poisoned, whole, strict=True):
        assert unequal(one[:40], other[:40]) == 0


def test_graph_replays_follow_positions_and_data(rows, unequal) -> None:
    joint, weight, graph = (
        Joint(rows, 64, HEADS[0]),
        rows("normal", 1, 1024)[0],
        torch.cuda.CUDAGraph(),
    )
    x, y = rows("normal", 64, 1024), rows("wide", 64, 1024)

    def step() -> list[Tensor]:
        halves = silu_mul(*x.chunk(2, 1))
        return [joint.fused(joint.x, joint.positions), *add_rms_norm(x, y, weight, EPS), halves]

    step()
    with torch.cuda.graph(graph):
        captured = step()
    joint.positions += 1
    x.neg_()
    graph.replay()
    for one, other in zip(captured, step(), strict=True):
        assert unequal(one, other) == 0


def test_control_sum_without_its_rounding_fails(rows, unequal) -> None:
    x, beside, weight = (
        rows("normal", 4096, 1024),
        rows("normal", 2, 1024)[1:] * 3,
        rows("normal", 1, 1024)[0],
    )
    normed = rms_norm(x.float() + beside.float(), weight.float(), EPS).bfloat16()
    assert unequal(normed, add_rms_norm(x, beside.expand_as(x), weight, EPS)[0]) > 0.01 * x.numel()


def test_control_rope_before_the_norms_rounding_fails(rows, unequal) -> None:
    joint = Joint(rows, 2048, HEADS[0])
    wide = joint.apart(
        joint.x.float(), joint.positions, [weight.float() for weight in joint.weights]
    )
    assert unequal(wide.bfloat16(), joint.fused(joint.x, joint.positions)) > 0.01 * wide.numel()


def test_control_table_in_bf16_fails(rows, unequal) -> None:
    joint = Joint(rows, 2048, HEADS[0])
    expected = joint.fused(joint.x, joint.positions)
    joint.cos, joint.sin = joint.cos.bfloat16().float(), joint.sin.bfloat16().float()
    assert unequal(joint.fused(joint.x, joint.positions), expected) > 0.01 * expected.numel()


def _head(hidden: Tensor, weight: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    return token_logprobs(linear_fp32(hidden, weight), targets, scale)[0]


@pytest.mark.parametrize(("vocab", "num_rows"), [(151936, 300), (5003, 700)])
def test_head_has_the_bits_and_gradients_of_its_parts(
    vocab: int, num_rows: int, rows, unequal
) -> None:
    hidden, weight = rows("normal", num_rows, 256), rows("normal", vocab, 256) * 0.1
    targets, scale = (
        torch.arange(num_rows, device="cuda") * 7 % vocab,
        torch.linspace(0.5, 2, num_rows, device="cuda"),
    )
    push = torch.randn(num_rows, device="cuda")

    def head(hidden: Tensor, weight: Tensor) -> Scores:
        return head_logprobs(
            hidden, weight, lambda part: linear_fp32(part, weight), targets, scale, 128
        )

    logprob, entropy, _ = head(hidden, weight)
    expected = token_logprobs(linear_fp32(hidden, weight), targets, scale)
    assert unequal(logprob, expected[0]) == unequal(entropy, expected[1]) == 0
    found = _gradients(lambda *leaves: head(*leaves)[0], [hidden, weight], push)
    wide = _gradients(
        lambda x, w: _head(x, w, targets, scale), [hidden.float(), weight.float()], push
    )
    for one, other in zip(found, wide, strict=True):
        assert _distance(one, other) < 8e-3


def test_remaking_keeps_less_and_gives_the_same_gradients(rows, unequal) -> None:
    leaves = [
        rows("normal", 4096, 1024),
        rows("wide", 4096, 1024),
        rows("normal", 1, 1024)[0],
        rows("normal", 512, 1024),
    ]

    def layer(x: Tensor, beside: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        normed, summed = add_rms_norm(x, beside, scale, EPS)
        return linear(silu_mul(linear(normed, weight), linear(summed, weight)), weight[:, :512])

    results, kept = [], []
    for context in (
        nullcontext(),
        nullcontext(),
        recomputing(),
    ):  # the first one warms up the library
        mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        before = torch.cuda.memory_allocated()
        with context:
            out = layer(*mine)
        kept.append(torch.cuda.memory_allocated() - before)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(leaf.grad for leaf in mine)])
    assert kept[1] - kept[2] == 4096 * (1024 + 512) * 2
    assert all(unequal(one, other) == 0 for one, other in zip(*results[1:], strict=True))
