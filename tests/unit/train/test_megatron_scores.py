"""Heads of Megatron-core's models: which drop their logits, and what ranks along tp share."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import Scores, token_scores
from spmd_rl.train.megatron import scores
from spmd_rl.train.megatron.scores import ScoredRows, VocabularyHead

ROWS, HIDDEN, VOCAB, MOST = 7, 4, 11, 3


class OneRank(NamedTuple):
    """Stands for a process group."""

    def size(self) -> int:
        return 1


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of the calls of `head_logprobs`, which scores all rows at once."""
    made: list[dict[str, Any]] = []

    def fused(
        hidden: Tensor,
        weight: Tensor,
        logits: Any,
        targets: Tensor,
        inv_temperature: Tensor,
        num_rows: int,
        **named: Any,
    ) -> Scores:
        made.append({"num_rows": num_rows, **named})
        assert weight.shape == (VOCAB, HIDDEN)
        plain = hidden.as_subclass(Tensor)
        return Scores(
            *token_scores(logits(plain), targets, inv_temperature, named["candidates"], None)
        )

    def of_logits(logits: Tensor, *rest: Any) -> Scores:
        return Scores(*token_scores(logits.as_subclass(Tensor), *rest))

    monkeypatch.setattr(scores, "head_logprobs", fused)
    monkeypatch.setattr(scores, "token_scores", of_logits)
    return made


def given(recomputes: bool) -> tuple[VocabularyHead, Tensor, ScoredRows]:
    made = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=made)
    hidden = torch.randn(ROWS, HIDDEN, generator=made)
    targets = torch.randint(VOCAB, (ROWS,), generator=made)
    candidates = torch.randint(VOCAB, (ROWS, 2), generator=made)
    group: Any = OneRank()
    head = VocabularyHead(weight, VOCAB, VOCAB, group, recomputes)
    return head, hidden, ScoredRows(targets, torch.linspace(0.5, 2.0, ROWS), candidates)


def test_a_gpu_drops_its_logits_and_scores_the_same(calls: list[dict[str, Any]]) -> None:
    head, hidden, rows = given(recomputes=False)
    expected = head.score(hidden, rows, MOST)
    assert calls == []
    found = head.score(hidden.as_subclass(OnGpu), rows, MOST, entropy_grad=True)
    (call,) = calls
    assert call == {
        "num_rows": MOST,
        "entropy_grad": True,
        "candidates": rows.candidates,
        "kept": None,
    }
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(one, other)


def test_recomputation_makes_them_again(calls: list[dict[str, Any]]) -> None:
    head, hidden, rows = given(recomputes=True)
    head.score(hidden.as_subclass(OnGpu), rows, ROWS)
    assert calls == []
