"""What the engine draws follows the distribution it was asked for. What it records is that one too,
or the unmasked one where filters are not replayed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spmd_rl.kernels import PackedAttention, sample_tokens, stream_keys
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.sequence_table import SequenceTable
from spmd_rl.train.microbatch import inverse_temperature

NUM_DRAWS = 4000
PROMPT = np.array([4, 9, 16, 25], dtype=np.int32)
CHI_SQUARE_36_999 = 67.99  # the 0.999 quantile with 36 degrees of freedom


@pytest.fixture(scope="module")
def draw(model, new_engine, finish):
    def run(**sampling):
        engine = new_engine(model, max_batch=512)
        config = SamplingConfig(max_tokens=1, ignore_eos=True, **sampling)
        samples = finish(
            engine, [Request(0, index, PROMPT, config, seed=11) for index in range(NUM_DRAWS)]
        )
        tokens = np.array([sample.tokens[0] for sample in samples.values()])
        return tokens, np.array([sample.logprobs[0] for sample in samples.values()])

    return run


@pytest.fixture(scope="module")
def logits(model):
    attend = PackedAttention(np.array([4]), device=torch.device("cpu"))
    return model(torch.from_numpy(PROMPT).long(), torch.arange(4), attend, torch.tensor([3]))[
        0
    ].double()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_draws_follow_the_softmax_and_record_it(draw, logits, temperature):
    tokens, logprobs = draw(temperature=temperature)
    expected = torch.log_softmax(logits / temperature, 0).numpy()
    assert np.allclose(logprobs, expected[tokens], atol=1e-5)
    counts = np.bincount(tokens, minlength=37)
    means = NUM_DRAWS * np.exp(expected)
    assert ((counts - means) ** 2 / means).sum() < CHI_SQUARE_36_999


def support(probs: np.ndarray, sampling: dict) -> set[int]:
    order = np.argsort(-probs, kind="stable")
    if "top_k" in sampling:
        order = order[: sampling["top_k"]]
    kept = probs[order] / probs[order].sum()
    if "top_p" in sampling:
        order = order[np.cumsum(kept) - kept < sampling["top_p"]]
    if "min_p" in sampling:
        order = order[probs[order] >= sampling["min_p"] * probs.max()]
    return set(order.tolist())


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(
    "sampling", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.7}]
)
def test_filters_draw_from_their_support_and_record_its_logprob(draw, logits, sampling, replay):
    tokens, logprobs = draw(**sampling, replay_filters=replay)
    unmasked = torch.log_softmax(logits, 0).numpy()
    kept = support(np.exp(unmasked), sampling)
    assert 1 < len(kept) < 37
    assert set(tokens.tolist()) <= kept
    likely = {token for token in kept if np.exp(unmasked[token]) > 0.01}
    assert likely <= set(tokens.tolist())
    mass = np.exp(unmasked[sorted(kept)]).sum() if replay else 1.0
    assert np.allclose(logprobs, unmasked[tokens] - np.log(mass), atol=1e-5)
    drawn, kept_tokens = np.bincount(tokens, minlength=37), sorted(kept)
    means = np.exp(unmasked[kept_tokens])
    means *= NUM_DRAWS / means.sum()
    assert ((drawn[kept_tokens] - means) ** 2 / means).sum() < CHI_SQUARE_36_999


def test_each_token_is_drawn_with_the_key_of_its_seed_prompt_sample_and_position(
    model, new_engine, finish
):
    names = [(uid, index, seed) for uid in (0, 5) for index in (0, 2) for seed in (uid, 9)]
    requests = [
        Request(
            uid + 10 * seed,
            index,
            PROMPT,
            SamplingConfig(max_tokens=6, ignore_eos=True),
            seed=seed,
        )
        for uid, index, seed in names
    ]
    samples = finish(new_engine(model), requests)
    for request in requests:
        sample = samples[request.uid, request.index]
        attend = PackedAttention(np.array([10]), device=torch.device("cpu"))
        tokens = torch.from_numpy(np.concatenate([PROMPT, sample.tokens])).long()
        rows = model(tokens, torch.arange(10), attend, torch.arange(3, 9))
        same = np.ones(6, dtype=np.int64)
        keys = stream_keys(request.seed, request.uid * same, request.index * same, np.arange(6))
        assert (
            sample_tokens(rows, torch.ones(6), torch.from_numpy(keys)).tolist()
            == sample.tokens.tolist()
        )


def test_greedy_takes_the_largest_and_scores_it_at_temperature_one(draw, logits):
    tokens, logprobs = draw(temperature=0.0)
    assert set(tokens.tolist()) == {int(logits.argmax())}
    assert np.allclose(logprobs, torch.log_softmax(logits, 0).max().item(), atol=1e-5)


def test_the_inverse_of_a_temperature_has_the_trainers_bits():
    """Division in float64, rounded after, gives other bits for many of these, such as 0.12, 0.48
    and 1.7.
    """
    table, prompt, others = SequenceTable(1, 8, 4), np.ones(2, np.int32), 0
    for temperature in (np.arange(1, 201) / 100).tolist():
        row = table.add(
            Request(0, 0, prompt, SamplingConfig(temperature=temperature)),
            [0],
            num_computed=0,
            stop_ids=(),
        )
        (expected,) = inverse_temperature(np.array([temperature], np.float32))
        assert table.inv_temperature[row] == expected, temperature
        others += np.float32(1 / temperature) != expected
        table.remove([row])
    assert others > 20
