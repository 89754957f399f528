"""Cases of ops from hidden states to log-probs, and around a recorded step, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.kernels.cases import Case, bf16
from benchmarks.shapes import QWEN3, VOCAB
from spmd_rl.kernels import head_logprobs, linear_fp32, sample_and_score, token_logprobs

LOGIT_ROWS = 2048  # of a chunk of the training loss


def of_step(rows: int, page_size: int = 128, pages: int = 16) -> Iterator[Case]:
    """Yield the kernels that read the inputs of a recorded decoding step and store its outputs."""
    from spmd_rl.kernels.attention.decode_inputs_triton import decode_inputs
    from spmd_rl.kernels.vocab.decode_outputs_triton import decode_outputs

    order, starts = (
        torch.randperm(rows, device="cuda"),
        torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )
    newest, turn = (torch.zeros(count, dtype=torch.int64, device="cuda") for count in (rows + 1, 1))
    host_tokens = torch.zeros(2, rows, dtype=torch.int64, pin_memory=True)
    host_logprobs = torch.zeros(2, rows, pin_memory=True)

    def torch_inputs(positions: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        page = table.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1).long()
        slots = page * page_size + positions % page_size
        num_keys = (positions + 1).int()
        return newest[order], slots, positions + 1 - starts, num_keys, positions.add_(1)

    def torch_outputs(tokens: Tensor, logprobs: Tensor) -> None:
        newest[order] = tokens
        host_tokens[0].copy_(tokens, non_blocking=True)
        host_logprobs[0].copy_(logprobs, non_blocking=True)

    yield Case(
        f"{rows} rows: decode_inputs",
        lambda positions, table: decode_inputs(newest, order, positions, starts, table, page_size),
        torch_inputs,
        lambda: (
            starts.clone(),
            torch.arange(rows * pages, dtype=torch.int32, device="cuda").view(rows, pages),
        ),
        9 * 8 * rows,
        rounds=1,
    )
    yield Case(
        f"{rows} rows: decode_outputs",
        lambda tokens, logprobs: decode_outputs(
            tokens, logprobs, order, newest, host_tokens, host_logprobs, turn
        ),
        torch_outputs,
        lambda: (
            torch.zeros(rows, dtype=torch.int64, device="cuda"),
            torch.zeros(rows, device="cuda"),
        ),
        5 * 8 * rows,
        rounds=1,
    )


def of_head(name: str) -> Iterator[Case]:
    hidden = QWEN3[name][0]
    one, targets = (
        torch.ones(LOGIT_ROWS, device="cuda"),
        torch.randint(VOCAB, (LOGIT_ROWS,), device="cuda"),
    )
    yield Case(
        f"Qwen3-{name}, {LOGIT_ROWS} rows: head_logprobs",
        lambda x, weight: head_logprobs(
            x, weight, lambda rows: linear_fp32(rows, weight), targets, one, LOGIT_ROWS
        ),
        lambda x, weight: (
            torch.mm(x, weight.t()).float().log_softmax(-1).gather(1, targets.unsqueeze(1))
        ),
        lambda: (bf16(LOGIT_ROWS, hidden), bf16(VOCAB, hidden)),
        2 * (LOGIT_ROWS + VOCAB) * hidden,
    )


def torch_draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    drawn = (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)
    return drawn, logits.log_softmax(-1).gather(1, drawn.unsqueeze(1))


def of_vocabulary(rows: int, *, decoding: bool) -> Iterator[Case]:
    one = torch.ones(rows, device="cuda")
    targets = torch.randint(VOCAB, (rows,), device="cuda")

    def logits() -> tuple[Tensor, ...]:
        return (torch.randn(rows, VOCAB, device="cuda"),)

    num_bytes = 4 * rows * VOCAB
    if decoding:
        yield Case(
            f"{rows} rows of {VOCAB} logits: sample_and_score",
            lambda logits: sample_and_score(logits, one, targets, targets, greedy=None),
            torch_draw,
            logits,
            num_bytes,
        )
    else:
        yield Case(
            f"{rows} rows of {VOCAB} logits: token_logprobs",
            lambda logits: token_logprobs(logits, targets, one),
            lambda logits: logits.log_softmax(-1).gather(1, targets.unsqueeze(1)),
            logits,
            num_bytes,
        )
