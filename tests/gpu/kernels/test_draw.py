"""Close draws on a GPU: the greatest exact noise wins, and of equals the lowest id."""

from __future__ import annotations

from typing import TypedDict

import pytest
import torch
from torch import Tensor
from torch.cuda import graph_pool_handle

from spmd_rl.kernels import (
    gumbel_noise,
    position_keys,
    sample_and_score,
    sample_tokens,
    token_logprobs,
)
from spmd_rl.kernels.runtime.cuda_graph import record
from spmd_rl.kernels.vocab import sampling
from spmd_rl.kernels.vocab.filters import filter_scores_

NUM_ROWS = 24
VOCAB = 20011


def _noise(vocab: int = VOCAB) -> tuple[Tensor, Tensor, Tensor]:
    """Return bases and positions of rows, and their noise."""
    bases = torch.arange(NUM_ROWS, device="cuda") * 0x1234567890ABCDEF
    positions = torch.arange(NUM_ROWS, device="cuda") * 7
    return bases, positions, gumbel_noise(position_keys(bases, positions), vocab)


def _only(columns: Tensor, values: Tensor, vocab: int = VOCAB) -> Tensor:
    """Return logits of minus infinity, except in some columns of each row."""
    return torch.full((NUM_ROWS, vocab), -torch.inf, device="cuda").scatter_(1, columns, values)


def _check(logits: Tensor, inv_temperature: float) -> Tensor:
    """Check draws, in a second call with every other row greedy; return the first draws."""
    bases, positions, noise = _noise(logits.shape[1])
    keys, scale = (
        position_keys(bases, positions),
        torch.full((NUM_ROWS,), inv_temperature, device="cuda"),
    )
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
    """Sums differ by a few roundings at most. The exact noise decides, then the lowest id."""
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
        logits = {
            "equal": torch.zeros_like(logits),
            "levels": logits.round(),
            "huge": logits * 1e8,
        }[kind]
    _check(logits, inv_temperature)


@pytest.mark.parametrize("inv_temperature", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("vocab", [1, 7, 511, 513, VOCAB])
def test_one_finite_logit_is_drawn(vocab: int, inv_temperature: float) -> None:
    columns = torch.randint(vocab, (NUM_ROWS, 1), device="cuda")
    drawn = _check(
        _only(columns, torch.full_like(columns, -3.0, dtype=torch.float32), vocab), inv_temperature
    )
    assert torch.equal(drawn, columns[:, 0])


def test_greedy_ties_across_the_vocabulary() -> None:
    columns = torch.tensor([17, 512, 5000, VOCAB - 1], device="cuda").expand(NUM_ROWS, -1)
    _check(_only(columns, torch.full(columns.shape, 2.0, device="cuda")), 1.0)


FILTERS: dict[str, dict[str, float]] = {
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "two": {"top_p": 0.3, "min_p": 1e-4},
    "many": {"top_k": 5000, "top_p": 0.999},
    "all": {"top_k": 300, "top_p": 0.9, "min_p": 0.05},
}


class Rows(TypedDict, total=False):
    """The filters of each row, by the names that `sample_and_score` has for them."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def _rows(count: int, filters: dict[str, float]) -> Rows:
    """Return filters that are off in every seventh row."""
    off = torch.arange(count, device="cuda") % 7 == 3

    def column(name: str, nothing: int, dtype: torch.dtype) -> Tensor:
        values = torch.full((count,), filters[name], device="cuda", dtype=dtype)
        return values.masked_fill(off, nothing)

    rows: Rows = {}
    if "top_k" in filters:
        rows["top_k"] = column("top_k", 0, torch.int64)
    if "top_p" in filters:
        rows["top_p"] = column("top_p", 1, torch.float32)
    if "min_p" in filters:
        rows["min_p"] = column("min_p", 0, torch.float32)
    return rows


def _sorted(logits: Tensor, scale: Tensor, rows: Rows) -> Tensor:
    """Return what a sort leaves."""
    scores = logits * scale[:, None]
    return filter_scores_(scores, rows.get("top_k"), rows.get("top_p"), rows.get("min_p"))


@pytest.mark.parametrize("kind", ["normal", "levels", "equal", "peaked", "huge"])
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [7, 1025, 151936])
def test_filters_leave_what_a_sort_leaves(vocab: int, filters: str, kind: str) -> None:
    normal = torch.randn(NUM_ROWS, vocab, device="cuda") * 2
    kinds = {
        "levels": normal.round(),
        "equal": normal * 0,
        "peaked": normal * 8,
        "huge": normal * 1e8,
    }
    logits, scale = kinds.get(kind, normal), torch.linspace(0.5, 2, NUM_ROWS, device="cuda")
    rows = _rows(NUM_ROWS, FILTERS[filters])
    filters_of_rows = rows.get("top_k"), rows.get("top_p"), rows.get("min_p")
    found, scale_of_found = sampling._filtered(logits, scale, None, filters_of_rows, None)
    expected = _sorted(logits, scale, rows)
    assert torch.equal(found, expected)
    assert (scale_of_found == 1).all(), "the scores are at their temperature already"
    assert vocab == 7 or (expected[0] == -torch.inf).any()


@pytest.mark.parametrize("filters", ["two", "all"])
def test_a_filtered_draw_is_the_greatest_of_what_is_left(filters: str) -> None:
    bases, positions, noise = _noise()
    logits, scale = (
        torch.randn(NUM_ROWS, VOCAB, device="cuda") * 3,
        torch.full((NUM_ROWS,), 0.8, device="cuda"),
    )
    greedy, rows = torch.arange(NUM_ROWS, device="cuda") % 3 == 0, _rows(NUM_ROWS, FILTERS[filters])
    expected = (_sorted(logits, scale, rows) + noise).argmax(1)
    drawn, logprobs = sample_and_score(logits, scale, bases, positions, **rows)
    assert torch.equal(drawn, expected)
    assert not torch.equal(drawn, sample_and_score(logits, scale, bases, positions)[0])
    assert torch.equal(logprobs, token_logprobs(logits, drawn, scale)[0])
    mixed = torch.where(greedy, logits.argmax(1), expected)
    assert torch.equal(
        sample_and_score(logits, scale, bases, positions, greedy=greedy, **rows)[0], mixed
    )


def test_a_recorded_filtered_draw() -> None:
    """Replay a graph over logits that came after it was recorded."""
    bases, positions, _ = _noise()
    logits, scale = torch.randn(NUM_ROWS, VOCAB, device="cuda"), torch.ones(NUM_ROWS, device="cuda")
    rows = _rows(NUM_ROWS, FILTERS["all"])
    sample_and_score(logits, scale, bases, positions, **rows)
    graph, drawn = record(
        lambda: sample_and_score(logits, scale, bases, positions, **rows)[0], graph_pool_handle()
    )
    for _ in range(3):
        logits.copy_(torch.randn_like(logits))
        expected = sample_and_score(logits.clone(), scale, bases, positions, **rows)[0]
        drawn.fill_(-1)
        graph.replay()
        assert torch.equal(drawn, expected)


@pytest.mark.parametrize("vocab", [151936, 32001])
@pytest.mark.parametrize("filters", FILTERS)
def test_filters_do_not_depend_on_company(vocab: int, filters: str) -> None:
    logits, scale = torch.randn(513, vocab, device="cuda"), torch.ones(513, device="cuda")
    rows = _rows(513, FILTERS[filters])
    top_k, top_p, min_p = rows.get("top_k"), rows.get("top_p"), rows.get("min_p")
    whole, _ = sampling._filtered(logits, scale, None, (top_k, top_p, min_p), None)
    assert (whole > -torch.inf).sum(1).min() > 10
    for count in (1, 3, 64, 65, 512):
        first = [None if of is None else of[:count] for of in (top_k, top_p, min_p)]
        found, _ = sampling._filtered(
            logits[:count], scale[:count], None, (first[0], first[1], first[2]), None
        )
        assert torch.equal(found, whole[:count])
