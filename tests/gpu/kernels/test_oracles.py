"""GPU ops and gradients agree with float64 on the CPU, and sampling with the torch version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.kernels import (
    gumbel_noise,
    linear,
    linear_fp32,
    rms_norm,
    rope,
    rope_table,
    sample_tokens,
    silu_mul,
    stream_keys,
    token_logprobs,
)

COS, SIN = rope_table(1.0 / 1e4 ** (torch.arange(0, 64, 2) / 64), 300)
Op = Callable[..., Tensor]


def _rotated(x: Tensor) -> Tensor:
    cos, sin = COS.to(x)[: len(x)].unsqueeze(1), SIN.to(x)[: len(x)].unsqueeze(1)
    first, second = x.unflatten(1, (4, 64)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


OPS: dict[str, tuple[Op, Op]] = {
    "rms_norm": (
        lambda x, w: rms_norm(x, w[0], 1e-6),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[0],
    ),
    "head_norm": (
        lambda x, w: rms_norm(x.unflatten(1, (4, 64)), w[0, :64], 1e-6),
        lambda x, w: (
            (y := x.unflatten(1, (4, 64)))
            * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            * w[0, :64]
        ),
    ),
    "rope": (
        lambda x, w: rope(x.unflatten(1, (4, 64)), COS.cuda()[: len(x)], SIN.cuda()[: len(x)]),
        lambda x, w: _rotated(x),
    ),
    "silu_mul": (lambda x, w: silu_mul(x, w[: len(x)]), lambda x, w: F.silu(x) * w[: len(x)]),
    "linear": (lambda x, w: linear(x, w, w[:, 0]), lambda x, w: x @ w.t() + w[:, 0]),
    "linear_fp32": (lambda x, w: linear_fp32(x, w), lambda x, w: x @ w.t()),
}


def _distance(x: Tensor, y: Tensor) -> float:
    x, y = x.detach().double().cpu(), y.detach()
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("num_rows", [5, 600])
@pytest.mark.parametrize("name", OPS)
def test_forward_and_gradients(name: str, num_rows: int, rows) -> None:
    op, oracle = OPS[name]
    num_rows = min(num_rows, 300) if name == "rope" else num_rows
    x, w = rows("normal", num_rows, 256), rows("normal", 640, 256)
    push, results = None, []
    for one, dtype, device in ((op, torch.bfloat16, "cuda"), (oracle, torch.float64, "cpu")):
        leaf, other = (t.to(device, dtype, copy=True).requires_grad_() for t in (x, w))
        out = one(leaf, other)
        push = (
            torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            if push is None
            else push
        )
        out.backward(push.to(out.device, out.dtype))
        results.append([out, leaf.grad] + ([other.grad] if other.grad is not None else []))
    for actual, expected in zip(*results, strict=True):
        assert _distance(actual, expected) < 6e-3


@pytest.mark.parametrize("vocab", [5, 4096, 50257])
def test_logprobs(vocab: int, rows) -> None:
    x = (rows("normal", 300, vocab, torch.float32) * 3).requires_grad_()
    targets = torch.arange(300, device="cuda") % vocab
    scale = torch.linspace(0.5, 2, 300, device="cuda")
    logprob, entropy = token_logprobs(x, targets, scale)
    logprob.backward(scale)
    wide = x.detach().cpu().double().requires_grad_()
    every = (wide * scale.cpu().double()[:, None]).log_softmax(-1)
    expected = every.gather(1, targets.cpu()[:, None])[:, 0]
    expected.backward(scale.cpu().double())
    torch.testing.assert_close(logprob.cpu().double(), expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(
        entropy.cpu().double(), -(every.exp() * every).sum(-1), rtol=0, atol=2e-5
    )
    torch.testing.assert_close(x.grad.cpu().double(), wide.grad, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("vocab", [7, 5003, 151936])
def test_drawn_tokens_equal_torch(vocab: int, rows) -> None:
    logits = rows("normal", 256, vocab, torch.float32) * 2
    ids = np.arange(256)
    keys = torch.from_numpy(stream_keys(3, ids % 8, ids, ids * 7)).cuda()
    scale, greedy = (
        torch.linspace(0.3, 2, 256, device="cuda"),
        torch.arange(256, device="cuda") % 9 == 0,
    )
    noise = gumbel_noise(keys, vocab)
    expected = torch.where(greedy, logits.argmax(1), (logits * scale[:, None] + noise).argmax(1))
    drawn = sample_tokens(logits, scale, keys, greedy=greedy)
    assert torch.equal(drawn, expected)
    alone = torch.cat(
        [sample_tokens(logits[i : i + 1], scale[i : i + 1], keys[i : i + 1]) for i in range(1, 9)]
    )
    assert torch.equal(alone, expected[1:9])
    few = sample_tokens(logits, scale, keys, top_k=torch.full((256,), 1, device="cuda"))
    assert torch.equal(few, logits.argmax(1))


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(4, 20000, device="cuda")
    logits[:, [700, 700 + 512, 9000, 19999]] = 5.0
    ones, keys = torch.ones(4, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
    assert (
        sample_tokens(
            logits, ones, keys, greedy=torch.ones(4, dtype=torch.bool, device="cuda")
        ).tolist()
        == [700] * 4
    )


@pytest.mark.parametrize("second", [100 + 512, 101])
def test_a_second_entry_near_the_top_is_not_lost(second: int) -> None:
    """The runner-up of the estimates wins if the exact noise says so, in any lane."""
    vocab, num_rows = 4096, 512
    ids = np.arange(num_rows)
    keys = torch.from_numpy(stream_keys(9, ids, ids, ids)).cuda()
    noise, ones = gumbel_noise(keys, vocab), torch.ones(num_rows, device="cuda")
    logits = torch.full((num_rows, vocab), -100.0, device="cuda")
    gaps = torch.linspace(-3e-6, 3e-6, num_rows, device="cuda")
    logits[:, 100], logits[:, second] = 1 - noise[:, 100], 1 - noise[:, second] + gaps
    expected = (logits + noise).argmax(1)
    assert set(expected.tolist()) == {100, second}
    assert torch.equal(sample_tokens(logits, ones, keys), expected)


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = (
        torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0], device="cuda")
        .expand(200_000, -1)
        .contiguous()
    )
    zeros = np.zeros(len(logits), dtype=np.int64)
    keys = torch.from_numpy(stream_keys(1, zeros, zeros, np.arange(len(logits)))).cuda()
    drawn = sample_tokens(logits, torch.ones(len(logits), device="cuda"), keys)
    share = torch.bincount(drawn, minlength=6) / len(drawn)
    torch.testing.assert_close(share, logits[0].softmax(0), rtol=0, atol=5e-3)
