"""Kernels around a decoding step, and the merge of ranges of keys, against numpy and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels.attention.merge_states import merge_states

ABSENT = -1


def _ranges(num_tokens: int, count: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return results with their log-sums in any order; what no token asks for is NaN."""
    generator = torch.Generator().manual_seed(count * dim)
    partial = torch.randn(num_tokens * count, heads, dim, generator=generator).bfloat16()
    log_sum = 4 * torch.randn(num_tokens * count, heads, generator=generator)
    rows = torch.randperm(num_tokens * count, generator=generator).view(num_tokens, count).int()
    absent = torch.arange(count) > torch.arange(num_tokens).unsqueeze(1) % count
    partial[rows[absent].long()], log_sum[rows[absent].long()] = torch.nan, torch.nan
    return partial, log_sum, rows.masked_fill(absent, ABSENT)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_merged_ranges_against_float64(count: int, dim: int) -> None:
    partial, log_sum, rows = _ranges(33, count, 4, dim)
    there = (rows >= 0).unsqueeze(-1)
    sums = torch.where(there, log_sum[rows.clamp(min=0)].double(), -torch.inf)
    values = torch.where(there.unsqueeze(-1), partial[rows.clamp(min=0)].double(), 0)
    expected = (values * sums.softmax(1).unsqueeze(-1)).sum(1)
    out, merged = torch.empty(33, 4, dim).bfloat16().cuda(), torch.empty(4, 33).cuda().t()
    merge_states(partial.cuda(), log_sum.t().contiguous().cuda().t(), rows.cuda(), out, merged)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(merged.cpu().double(), sums.logsumexp(1), rtol=1e-6, atol=2e-6)
    alone = (rows >= 0).sum(1) == 1
    assert torch.equal(out.cpu()[alone], partial[rows[alone, 0].long()]), (
        "one range is returned as it is"
    )


def test_control_a_range_left_out_is_seen() -> None:
    partial, log_sum, rows = (x.cuda() for x in _ranges(33, 2, 4, 64))
    outs = [torch.empty(33, 4, 64).bfloat16().cuda() for _ in range(2)]
    first_only = rows.clone()
    first_only[:, 1] = ABSENT
    for out, of in zip(outs, (rows, first_only), strict=True):
        merge_states(partial, log_sum, of, out)
    several = (rows >= 0).sum(1) == 2
    assert several.any()
    assert not torch.equal(outs[0][several], outs[1][several])
    assert torch.equal(outs[0][~several], outs[1][~several])


@pytest.mark.parametrize("batch", [1, 128, 300])
def test_inputs_of_a_decoding_step(batch: int) -> None:
    from spmd_rl.kernels.attention.decode_inputs_triton import decode_inputs

    page_size, num_rows, generator = 16, 400, torch.Generator().manual_seed(batch)
    newest = torch.randint(1, 50_000, (num_rows + 1,), generator=generator)
    rows = torch.randperm(num_rows, generator=generator)[:batch]
    rows[::7] = num_rows  # nobody's
    positions = torch.randint(0, 8 * page_size, (batch,), generator=generator)
    starts = (positions - torch.arange(batch) % 5).clamp(min=0)
    pages = torch.randint(0, 2**27, (batch, 8), generator=generator).int()  # slots beyond 2**31
    moving = positions.cuda()
    now = decode_inputs(newest.cuda(), rows.cuda(), moving, starts.cuda(), pages.cuda(), page_size)
    somebody = rows < num_rows
    page = pages.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1).long()
    slots = torch.where(somebody, page * page_size + positions % page_size, -1)
    expected = (newest[rows], positions, positions + 1 - starts, slots, (positions + 1).int())
    assert all(torch.equal(one.cpu(), other) for one, other in zip(now, expected, strict=True))
    assert torch.equal(moving.cpu(), torch.where(somebody, positions + 1, 0))


def test_routes_of_a_decoding_step_are_shortened() -> None:
    from spmd_rl.kernels.moe.route_hash import short
    from spmd_rl.kernels.vocab.decode_outputs_triton import decode_outputs

    generator = torch.Generator().manual_seed(0)
    state = torch.randint(-(2**63), 2**63 - 1, (600,), generator=generator)
    rows, newest = torch.arange(600).cuda(), torch.zeros(601, dtype=torch.int64).cuda()
    turn, host = torch.tensor([1]).cuda(), torch.full((2, 750), -5, dtype=torch.int32).pin_memory()
    tokens = torch.zeros(2, 750, dtype=torch.int64).pin_memory()
    logprobs = torch.zeros(2, 750).pin_memory()
    decode_outputs(
        rows, torch.zeros(600).cuda(), rows, newest, tokens, logprobs, turn, state.cuda(), host
    )
    torch.cuda.synchronize()
    assert torch.equal(host[1, :600], short(state))
    assert (host[0] == -5).all()
    assert (host[1, 600:] == -5).all()


@pytest.mark.parametrize("batch", [1, 512, 700])
def test_outputs_of_a_decoding_step(batch: int) -> None:
    from spmd_rl.kernels.vocab.decode_outputs_triton import decode_outputs

    rows = torch.randperm(800)[:batch]
    newest = torch.zeros(801, dtype=torch.int64, device="cuda")
    host_tokens = torch.full((2, 750), -5, dtype=torch.int64, pin_memory=True)
    host_logprobs = torch.full((2, 750), -5.0, pin_memory=True)
    turn = torch.tensor([7], device="cuda")
    steps = [(torch.randint(1, 50_000, (batch,)), torch.randn(batch)) for _ in range(3)]
    for tokens, logprobs in steps:
        decode_outputs(
            tokens.cuda(), logprobs.cuda(), rows.cuda(), newest, host_tokens, host_logprobs, turn
        )
    torch.cuda.synchronize()
    assert turn.item() % 2 == 0, "the place of the next step"
    # the third takes the first's place
    for place, (tokens, logprobs) in ((0, steps[1]), (1, steps[2])):
        assert torch.equal(host_tokens[place, :batch], tokens)
        assert torch.equal(host_logprobs[place, :batch], logprobs)
    assert (host_tokens[:, batch:] == -5).all()
    assert (host_logprobs[:, batch:] == -5).all()
    expected = torch.zeros(801, dtype=torch.int64)
    expected[rows] = steps[2][0]
    assert torch.equal(newest.cpu(), expected)
