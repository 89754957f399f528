"""Draws on a GPU where they are close: the entry with the greatest exact noise wins, and of equals the lowest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import gumbel_noise, position_keys, sample_and_score, sample_tokens, sampling, token_logprobs

NUM_ROWS = 24
VOCAB = 20011


def _noise(vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Bases and positions of rows, and the noise that belongs to them."""
    bases = torch.arange(NUM_ROWS, device="cuda") * 0x1234567890ABCDEF
    positions = torch.arange(NUM_ROWS, device="cuda") * 7
    return bases, positions, gumbel_noise(position_keys(bases, positions), vocab)


def _only(columns: Tensor, values: Tensor, vocab: int = VOCAB) -> Tensor:
    """Logits of minus infinity but for some columns of each row."""
    return torch.full((NUM_ROWS, vocab), -torch.inf, device="cuda").scatter_(1, columns, values)


def _check(logits: Tensor, inv_temperature: float) -> Tensor:
    """Draws, every other row greedy in a second call; returns what the first drew."""
    bases, positions, noise = _noise(logits.shape[1])
    keys, scale = position_keys(bases, positions), torch.full((NUM_ROWS,), inv_temperature, device="cuda")
    expected = (logits * scale[:, None] + noise).argmax(1)
    drawn, logprobs = sample_and_score(logits, scale, bases, positions)
    assert torch.equal(drawn, expected)
    assert torch.equal(logprobs, token_logprobs(logits, drawn, scale)[0])
    greedy = torch.arange(NUM_ROWS, device="cuda") % 2 == 0
    mixed = torch.where(greedy, logits.argmax(1), expected)
    assert torch.equal(sample_and_score(logits, scale, bases, positions, greedy=greedy)[0], mixed)
    assert torch.equal(sample_tokens(logits, scale, keys, greedy=greedy), mixed)
    return drawn


@pytest.mark.parametrize("width", [8, 600, VOCAB])
def test_near_ties_within_blocks_and_across(width: int) -> None:
    """Sums that differ by a few roundings at most: wherever they lie, the exact noise decides, then the lowest id."""
    noise = _noise()[2]
    gaps = torch.randint(-3, 3, noise.shape, device="cuda") * 2.0**-20
    columns = torch.randint(width, (NUM_ROWS, 300), device="cuda") + (VOCAB - width) // 2
    drawn = _check(_only(columns, (5 + gaps - noise).gather(1, columns)), 1.0)
    assert not torch.equal(drawn, columns.amin(1))


@pytest.mark.parametrize("inv_temperature", [1e-9, 0.5, 1.0, 100.0, 1e9])
@pytest.mark.parametrize("kind", ["normal", "equal", "levels", "huge", "all near"])
def test_any_temperature(kind: str, inv_temperature: float) -> None:
    logits = torch.randn(NUM_ROWS, VOCAB, device="cuda") * 3
    if kind == "all near":
        logits = 5 - _noise()[2]
    elif kind != "normal":
        logits = {"equal": torch.zeros_like(logits), "levels": logits.round(), "huge": logits * 1e8}[kind]
    _check(logits, inv_temperature)


@pytest.mark.parametrize("inv_temperature", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("vocab", [1, 7, 511, 513, VOCAB])
def test_one_finite_logit_is_drawn(vocab: int, inv_temperature: float) -> None:
    columns = torch.randint(vocab, (NUM_ROWS, 1), device="cuda")
    drawn = _check(_only(columns, torch.full_like(columns, -3.0, dtype=torch.float32), vocab), inv_temperature)
    assert torch.equal(drawn, columns[:, 0])


def test_greedy_ties_across_the_vocabulary() -> None:
    columns = torch.tensor([17, 512, 5000, VOCAB - 1], device="cuda").expand(NUM_ROWS, -1)
    _check(_only(columns, torch.full(columns.shape, 2.0, device="cuda")), 1.0)


@pytest.mark.parametrize("vocab", [151936, 32001])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_p": 0.3, "min_p": 1e-4}, {"top_p": 0.999, "top_k": 5000}])
def test_filters_do_not_depend_on_company(vocab: int, filters: dict[str, float]) -> None:
    """A nucleus of many entries, whose probabilities a scan adds up in an order of its own for each number of rows."""
    logits = torch.randn(513, vocab, device="cuda")
    rows = {name: torch.full((513,), filters.get(name, 0), device="cuda") for name in ("top_k", "top_p", "min_p")}
    whole = sampling._filter(logits.clone(), tuple(rows.values()))
    assert (whole > -torch.inf).sum(1).min() > 100
    for count in (1, 3, 64, 65, 512):
        found = sampling._filter(logits[:count].clone(), tuple(one[:count] for one in rows.values()))
        assert torch.equal(found, whole[:count])
