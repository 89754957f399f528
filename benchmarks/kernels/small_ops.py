"""The contract's ops between the products, beside the same op spelled in torch's own kernels, and the time of a copy.

Rows of a decoding step (64, 256) and of a pack of training (16,384). Each number is the median over replays of a graph
that runs the op once for each of several inputs, together larger than L2. The share of a copy is the time that what is
read and written once would take at a copy's bandwidth. torch's spelling: indexing, F.rms_norm behind an addition,
F.rms_norm and rotation head by head, then index_copy into the pages, F.silu times up, log_softmax and gather, Gumbel
noise and argmax, for top-p behind a sort, a softmax and its running sum, results weighted by a softmax of their sums.
The head's product with its log-probs is torch.mm and log_softmax.

    python -m benchmarks.kernels.small_ops [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import ROUNDS, copy_bytes_per_s, microseconds
from benchmarks.record import compared, finish, gpu, measured
from benchmarks.shapes import HEAD_DIM, QWEN3, VOCAB
from benchmarks.table import Row
from spmd_rl.kernels import (
    KvPlace,
    add_rms_norm,
    embed,
    head_logprobs,
    linear_fp32,
    qk_norm_rope,
    qk_norm_rope_into,
    rms_norm,
    rope_table,
    sample_and_score,
    silu_mul,
    token_logprobs,
    write_kv,
)
from spmd_rl.kernels.merge import merge_ranges

MODELS = ("0.6B", "8B")
DECODING, TRAINING = (64, 256), 16384
LOGIT_ROWS = 2048  # of a chunk of the training loss
COLD_BYTES = 256 << 20
CALLS = 8
EPS = 1e-6
PAGE_SIZE = 128
TOP_P = 0.95

Op = Callable[..., object]


class Case(NamedTuple):
    """`ours` and `torch` take the tensors of `inputs()`; together they move `num_bytes` at least."""

    what: str
    ours: Op
    torch: Op
    inputs: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    rounds: int = ROUNDS


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def of_model(name: str, rows: int) -> Iterator[Case]:
    hidden, inner = QWEN3[name][:2]
    weight = torch.ones(hidden, device="cuda").bfloat16()

    def torch_add_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = x + residual
        return F.rms_norm(summed, (hidden,), weight, EPS), summed

    where = f"Qwen3-{name}, {rows} rows"
    row = 2 * rows
    yield Case(
        f"{where}: embed",
        embed,
        lambda ids, table: table[ids],
        lambda: (torch.randperm(rows, device="cuda"), bf16(rows, hidden)),
        2 * row * hidden,
    )
    yield Case(
        f"{where}: rms_norm",
        lambda x: rms_norm(x, weight, EPS),
        lambda x: F.rms_norm(x, (hidden,), weight, EPS),
        lambda: (bf16(rows, hidden),),
        2 * row * hidden,
    )
    yield Case(
        f"{where}: add_rms_norm",
        lambda x, residual: add_rms_norm(x, residual, weight, EPS),
        torch_add_norm,
        lambda: (bf16(rows, hidden), bf16(rows, hidden)),
        4 * row * hidden,
    )
    yield Case(
        f"{where}: silu_mul",
        silu_mul,
        lambda gate, up: F.silu(gate) * up,
        lambda: (bf16(rows, inner), bf16(rows, inner)),
        3 * row * inner,
    )


def of_heads(name: str, rows: int) -> Iterator[Case]:
    heads, kv_heads = QWEN3[name][3:5]
    weight = torch.ones(HEAD_DIM, device="cuda").bfloat16()
    table = [one.cuda() for one in rope_table(1e6 ** -torch.arange(0, 1, 2 / HEAD_DIM), 4096)]
    positions, slots = torch.randint(4096, (rows,), device="cuda"), some_slots(rows)
    wide_table = [torch.cat([one, one], dim=1).bfloat16() for one in table]

    def torch_qk(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (one[positions].unsqueeze(1) for one in wide_table)
        q, k = (F.rms_norm(x, (HEAD_DIM,), weight, EPS) for x in (q, k))
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def ours_into(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        place = KvPlace(keys, values, slots)
        return qk_norm_rope_into(q, k, v, weight, weight, EPS, positions, *table, place)

    def torch_into(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k = torch_qk(q, k)
        torch_write(keys, values, slots, k, v)
        return q

    where = f"Qwen3-{name}, {rows} rows"
    q_shape, k_shape = (rows, heads, HEAD_DIM), (rows, kv_heads, HEAD_DIM)
    yield Case(
        f"{where}: qk_norm_rope",
        lambda q, k: qk_norm_rope(q, k, weight, weight, EPS, positions, *table),
        torch_qk,
        lambda: (bf16(*q_shape), bf16(*k_shape)),
        2 * 2 * rows * (heads + kv_heads) * HEAD_DIM,
    )
    yield Case(
        f"{where}: qk_norm_rope_into",
        ours_into,
        torch_into,
        lambda: (bf16(*q_shape), bf16(*k_shape), bf16(*k_shape), *some_pages(rows, kv_heads)),
        2 * 2 * rows * (heads + 2 * kv_heads) * HEAD_DIM,
    )


def some_slots(rows: int) -> Tensor:
    return torch.randperm(rows * 4, device="cuda")[:rows]


def some_pages(rows: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of as many tokens as `some_slots` chooses from."""
    shape = (4 * rows // PAGE_SIZE, PAGE_SIZE, kv_heads, HEAD_DIM)
    return bf16(*shape), bf16(*shape)


def torch_write(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    keys.flatten(0, 1).index_copy_(0, slots, k)
    values.flatten(0, 1).index_copy_(0, slots, v)


def of_cache(rows: int, kv_heads: int = 8) -> Iterator[Case]:
    slots = some_slots(rows)
    yield Case(
        f"{rows} rows of 8 heads: write_kv",
        lambda keys, values, k, v: write_kv(keys, values, slots, k, v),
        lambda keys, values, k, v: torch_write(keys, values, slots, k, v),
        lambda: (*some_pages(rows, kv_heads), bf16(rows, kv_heads, HEAD_DIM), bf16(rows, kv_heads, HEAD_DIM)),
        4 * 2 * rows * kv_heads * HEAD_DIM,
    )


def of_splits(rows: int, count: int = 8, heads: int = 32) -> Iterator[Case]:
    where = torch.arange(rows * count, device="cuda").view(rows, count)
    out = bf16(rows, heads, HEAD_DIM)

    def torch_merge(partial: Tensor, log_sum: Tensor) -> Tensor:
        weights = log_sum.view(rows, count, heads, 1).softmax(1)
        return (partial.view(rows, count, heads, HEAD_DIM).float() * weights).sum(1).bfloat16()

    yield Case(
        f"{rows} rows of {heads} heads in {count} splits: merge_ranges",
        lambda partial, log_sum: merge_ranges(partial, log_sum, where, out),
        torch_merge,
        lambda: (bf16(rows * count, heads, HEAD_DIM), torch.randn(rows * count, heads, device="cuda")),
        2 * rows * (count + 1) * heads * HEAD_DIM,
    )


def of_head(name: str) -> Iterator[Case]:
    hidden = QWEN3[name][0]
    one, targets = torch.ones(LOGIT_ROWS, device="cuda"), torch.randint(VOCAB, (LOGIT_ROWS,), device="cuda")
    yield Case(
        f"Qwen3-{name}, {LOGIT_ROWS} rows: head_logprobs",
        lambda x, weight: head_logprobs(x, weight, lambda rows: linear_fp32(rows, weight), targets, one, LOGIT_ROWS),
        lambda x, weight: torch.mm(x, weight.t()).float().log_softmax(-1).gather(1, targets.unsqueeze(1)),
        lambda: (bf16(LOGIT_ROWS, hidden), bf16(VOCAB, hidden)),
        2 * (LOGIT_ROWS + VOCAB) * hidden,
    )


def torch_draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    return drawn_and_scored(logits, logits)


def torch_draw_top_p(logits: Tensor) -> tuple[Tensor, Tensor]:
    ordered, order = logits.sort(dim=-1, descending=True)
    probs = ordered.softmax(-1)
    dropped = probs.cumsum(-1) - probs >= TOP_P
    return drawn_and_scored(logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf), logits)


def drawn_and_scored(kept: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    drawn = (kept - torch.empty_like(kept).exponential_().log_()).argmax(-1)
    return drawn, logits.log_softmax(-1).gather(1, drawn.unsqueeze(1))


def of_vocabulary(rows: int) -> Iterator[Case]:
    one = torch.ones(rows, device="cuda")
    targets = torch.randint(VOCAB, (rows,), device="cuda")

    def logits() -> tuple[Tensor, ...]:
        return (torch.randn(rows, VOCAB, device="cuda"),)

    num_bytes = 4 * rows * VOCAB
    if rows in DECODING:
        yield Case(
            f"{rows} rows of {VOCAB} logits: sample_and_score",
            lambda logits: sample_and_score(logits, one, targets, targets, greedy=None),
            torch_draw,
            logits,
            num_bytes,
        )
        top_p = one * TOP_P
        yield Case(
            f"{rows} rows of {VOCAB} logits: sample_and_score, top_p {TOP_P}",
            lambda logits: sample_and_score(logits, one, targets, targets, greedy=None, top_p=top_p),
            torch_draw_top_p,
            logits,
            num_bytes,
            rounds=1,
        )
    else:
        yield Case(
            f"{rows} rows of {VOCAB} logits: token_logprobs",
            lambda logits: token_logprobs(logits, targets, one),
            lambda logits: logits.log_softmax(-1).gather(1, targets.unsqueeze(1)),
            logits,
            num_bytes,
        )


def measure(case: Case, copy: float) -> Iterator[Row]:
    inputs = [case.inputs()]
    size = sum(one.numel() * one.element_size() for one in inputs[0])
    inputs += [case.inputs() for _ in range(max(CALLS, -(-COLD_BYTES // size)) - 1)]

    def time(op: Op) -> float:
        return microseconds(lambda given: op(*given), inputs, case.rounds)

    with torch.no_grad():
        ours = time(case.ours)
        yield compared(case.what, ours, "us", peer="torch", peer_value=time(case.torch))
    yield measured(f"{case.what}, share of a copy", 1e6 * case.num_bytes / copy / ours, "")


def main() -> int:
    sizes = (*DECODING, TRAINING)
    cases = [case for name in MODELS for rows in sizes for of in (of_model, of_heads) for case in of(name, rows)]
    cases += [case for rows in sizes for case in of_cache(rows)]
    cases += [case for rows in (*DECODING, LOGIT_ROWS) for case in of_vocabulary(rows)]
    cases += [case for rows in DECODING for case in of_splits(rows)]
    cases += of_head("0.6B")
    copy = copy_bytes_per_s()
    rows = [measured("copy, read and written", copy / 1e12, "TB/s")]
    for case in cases:
        rows += measure(case, copy)
        torch.cuda.empty_cache()
    return finish(__file__, ("torch", "triton"), rows, save="--save" in sys.argv, machine="h200", **gpu())


if __name__ == "__main__":
    sys.exit(main())
