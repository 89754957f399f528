"""The embedding on a GPU: rows alone, the trainer's and the engine's bits, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.shapes import VOCAB
from spmd_rl.kernels import embed

TABLES = [(VOCAB, 1024), (VOCAB, 2560), (VOCAB, 4096), (5003, 100)]
NUM_TOKENS = 8192
BOUND = 6e-3  # on a gradient's error; one token of a pack left out is more
OFTEN = 3  # an id that every sixth token has


def ids(num_tokens: int, vocab: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    drawn = torch.randint(vocab, (num_tokens,), device="cuda", generator=generator)
    drawn[::6] = OFTEN
    return drawn


def distance(x: Tensor, y: Tensor) -> float:
    return float((x.double().cpu() - y).norm() / y.norm())


@pytest.mark.parametrize(("vocab", "columns"), TABLES)
def test_rows(vocab: int, columns: int, rows, unequal, unequal_rows) -> None:
    table, tokens = rows("normal", vocab, columns), ids(NUM_TOKENS, vocab)
    assert unequal_rows(lambda tokens: embed(tokens, table), tokens) == 0
    assert unequal(embed(tokens, table).cpu(), table.cpu()[tokens.cpu()]) == 0


@pytest.mark.parametrize(("vocab", "columns"), TABLES)
def test_trainer_and_engine_read_the_same_bits(vocab: int, columns: int, rows, unequal) -> None:
    """A trainer gathers float32 masters in bfloat16; an engine has a bfloat16 table of its own."""
    masters, tokens = rows("wide", vocab, columns, torch.float32), ids(NUM_TOKENS, vocab)
    trained = embed(tokens, masters.bfloat16().requires_grad_()).detach()
    table = torch.empty_like(masters, dtype=torch.bfloat16).copy_(masters)
    with torch.inference_mode():
        assert unequal(embed(tokens, table), trained) == 0
    assert unequal(embed(tokens, masters).bfloat16(), trained) == 0


def test_control_masters_cut_off_instead_of_rounded_fail(rows, unequal) -> None:
    masters, tokens = rows("wide", 5003, 100, torch.float32), ids(NUM_TOKENS, 5003)
    cut_off = (masters.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()
    assert (
        unequal(embed(tokens, cut_off), embed(tokens, masters.bfloat16())) > 0.1 * NUM_TOKENS * 100
    )


@pytest.mark.parametrize("num_tokens", [5, 600, 16384])
def test_gradient(num_tokens: int, rows) -> None:
    """Tokens of one id add up, and an id without tokens has no gradient."""
    table, tokens = rows("normal", 5003, 256).requires_grad_(), ids(num_tokens, 5003)
    push = rows("normal", num_tokens, 256)
    embed(tokens, table).backward(push)
    oracle = torch.zeros(5003, 256, dtype=torch.float64)
    oracle.index_add_(0, tokens.cpu(), push.cpu().double())
    assert distance(table.grad, oracle) < BOUND
    never = torch.ones(5003, dtype=torch.bool, device="cuda").index_fill_(0, tokens, False)
    assert int(table.grad[never].count_nonzero()) == 0
    oracle[int(tokens[-1])] -= push[-1].cpu().double()
    assert distance(table.grad, oracle) > BOUND
