"""Scorer: gradients of log-probs, entropy and candidates through the model, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spmd_rl.kernels import PackedAttention, Scores
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.model.scorer import Scorer
from spmd_rl.train.microbatch import MicroBatch, lay_out
from tests.dist.train_case import VOCAB, make_batch, write_model_folder

NUM_CANDIDATES = 4
MANY_ROWS = 1 << 20
Score = Callable[[CausalLM], Scores]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"))
    spec = read_spec(folder)
    made = CausalLM(spec)
    made.load_state_dict(dict(random_weights(spec, 0)))
    return made


@pytest.fixture(scope="module")
def micro() -> MicroBatch:
    return lay_out(make_batch(), torch.device("cpu"))


@pytest.fixture(scope="module")
def candidates(micro: MicroBatch) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB, (micro.num_scored, NUM_CANDIDATES), generator=generator)


def by_log_softmax(model: CausalLM, micro: MicroBatch, candidates: Tensor) -> Scores:
    """Return the scores from all logits at once, with torch's log-softmax in float64."""
    attend = PackedAttention(
        micro.lengths,
        device=micro.tokens.device,
        prefixes=micro.prefixes,
    )
    hidden = model(micro.tokens, micro.positions, attend)
    logits = model.logits(hidden.index_select(0, micro.rows)).double()
    every = (logits * micro.inv_temperature.double().unsqueeze(1)).log_softmax(1)
    return Scores(
        every.gather(1, micro.targets.unsqueeze(1)).squeeze(1),
        -(every.exp() * every).sum(1),
        every.gather(1, candidates),
    )


def gradient(model: CausalLM, scores: Scores) -> Tensor:
    """Return the gradient of a loss that reads all scores, over all parameters."""
    assert scores.candidate_logprobs is not None
    pushes = [torch.linspace(-1, 1, part.numel()).view(part.shape) for part in scores]
    loss = sum((part * push).sum() for part, push in zip(scores, pushes, strict=True))
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


@pytest.mark.parametrize("logit_rows", [MANY_ROWS, 16])
def test_gradients_through_the_model(
    model: CausalLM, micro: MicroBatch, candidates: Tensor, logit_rows: int
) -> None:
    scorer = Scorer(model, logit_rows, recomputes=False)
    scores = scorer(micro, entropy_grad=True, candidates=candidates)
    expected = by_log_softmax(model, micro, candidates)
    for found, other in zip(scores, expected, strict=True):
        torch.testing.assert_close(found.double(), other, rtol=0, atol=1e-5)
    wanted = gradient(model, expected)
    assert distance(gradient(model, scores), wanted) < 2e-5
    # the negative control
    scores = scorer(micro, entropy_grad=True, candidates=candidates)
    flipped = scores._replace(entropy=-scores.entropy)
    assert distance(gradient(model, flipped), wanted) > 0.1


@pytest.mark.parametrize("logit_rows", [MANY_ROWS, 16])
def test_what_is_not_asked_for_changes_no_bit(
    model: CausalLM, micro: MicroBatch, candidates: Tensor, logit_rows: int
) -> None:
    scorer = Scorer(model, logit_rows, recomputes=False)
    plain = scorer(micro)
    assert not plain.entropy.requires_grad
    assert plain.candidate_logprobs is None
    asked = scorer(micro, entropy_grad=True, candidates=candidates)
    assert torch.equal(plain.logprobs, asked.logprobs)
    assert torch.equal(plain.entropy, asked.entropy)
    gradients = []
    for scores in (plain, asked):
        model.zero_grad()
        scores.logprobs.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_without_a_token_to_score_the_gradient_is_zero(model: CausalLM) -> None:
    batch = make_batch()
    micro = lay_out(batch.select([]), torch.device("cpu"))
    candidates = torch.zeros(0, NUM_CANDIDATES, dtype=torch.int64)
    scores = Scorer(model, 16, recomputes=False)(micro, entropy_grad=True, candidates=candidates)
    shapes = [part.shape for part in scores if part is not None]
    assert shapes == [(0,), (0,), (0, NUM_CANDIDATES)]
    model.zero_grad()
    sum(part.sum() for part in scores if part is not None).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and not grad.any() for grad in grads)
