"""Attention in splits: cut and merged it is attention over all keys; elsewhere it is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.controller.contracts import disagreement
from spmd_rl.errors import ConfigError
from spmd_rl.kernels import KvCache, contract
from spmd_rl.kernels.attention.backend import attention_backend
from spmd_rl.kernels.attention.kv_splits import KvSplits
from spmd_rl.kernels.attention.merge_states import merge_states
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import TrainerConfig
from tests.specs import kv_layers

CPU = torch.device("cpu")
HEADS, DIM = 2, 4
Seen = tuple[Tensor, Tensor]


def seen(q: Tensor, k: Tensor, v: Tensor) -> Seen:
    """Attend from a token [H, D] to keys [S, H, D] in float64, with the denominator's log [H]."""
    scores = torch.einsum("hd,shd->hs", q, k)
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


def merged(
    splits: KvSplits, starts: np.ndarray, data: list[tuple[Tensor, Tensor, Tensor]], size: int
) -> Tensor:
    """Compute the runs and pairs of `splits`, merged as `splits.rows` says; data [S, H, D] each."""
    parts: list[Seen] = []
    done = starts.copy()
    tokens = []  # (sequence, position) of each new token
    for sequence, split, length in zip(splits.sequence, splits.split, splits.lengths, strict=True):
        q, k, v = data[sequence]
        for position in range(done[sequence], done[sequence] + length):
            own = slice(split * size, position + 1)
            parts.append(seen(q[position], k[own], v[own]))
            tokens.append((sequence, position))
        done[sequence] += length
    row = 0
    for run, split in zip(splits.pair_run, splits.pair_split, strict=True):
        for _ in range(splits.lengths[run]):
            sequence, position = tokens[splits.queries[row]]
            q, k, v = data[sequence]
            keys = slice(split * size, (split + 1) * size)
            parts.append(seen(q[position], k[keys], v[keys]))
            row += 1
    partial, log_sum = (torch.stack(x) for x in zip(*parts, strict=True))
    out = torch.empty(len(tokens), HEADS, DIM)
    merge_states(partial, log_sum.float(), torch.from_numpy(splits.rows), out)
    return out


SEQUENCES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=4)


@settings(max_examples=40)
@given(SEQUENCES, st.integers(1, 16), st.integers(0, 9))
def test_splits_merge_to_attention_over_all_keys(
    sequences: list[tuple[int, int]], size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    starts, lengths = (np.array(x) for x in zip(*sequences, strict=True))
    data = [
        tuple(
            torch.randn(
                3, start + length, HEADS, DIM, generator=generator, dtype=torch.float64
            ).unbind()
        )
        for start, length in sequences
    ]
    splits = KvSplits.of(starts, lengths, size)
    whole = [
        seen(q[at], k[: at + 1], v[: at + 1])[0]
        for (q, k, v), (start, length) in zip(data, sequences, strict=True)
        for at in range(start, start + length)
    ]
    assert (splits.num_keys <= size).all()
    assert (
        (splits.rows >= 0).sum(1)
        == np.concatenate([s + np.arange(n) for s, n in sequences]) // size + 1
    ).all()
    torch.testing.assert_close(
        merged(splits, starts, data, size).double(), torch.stack(whole), atol=1e-5, rtol=1e-5
    )


def test_padding_sees_itself_alone() -> None:
    splits = KvSplits.of(np.array([0]), np.array([5]), 4, padding=3)
    assert splits.rows.tolist() == [
        [0, -1],
        [1, -1],
        [2, -1],
        [3, -1],
        [8, 4],
        [5, -1],
        [6, -1],
        [7, -1],
    ]


def test_one_range_is_returned_as_it_is() -> None:
    partial = torch.tensor([[[-0.0, 0.1, -3.0e38, 1e-30]]]).bfloat16()
    out, log_sum = torch.empty_like(partial), torch.full((1, 1), 7.5)
    merged_log_sum = torch.empty(1, 1)
    merge_states(partial, log_sum, torch.tensor([[0, -1, -1]]), out, merged_log_sum)
    assert out.view(torch.int16).equal(partial.view(torch.int16))
    assert merged_log_sum.equal(log_sum)


def test_results_past_the_last_range_do_not_matter() -> None:
    partial, log_sum = torch.randn(3, 1, 4), torch.randn(3, 1)
    out, other = torch.empty(1, 1, 4), torch.empty(1, 1, 4)
    rows = torch.tensor([[1, 2, -1]])
    merge_states(partial, log_sum, rows, out)
    partial[0], log_sum[0] = 1e30, 1e30
    merge_states(partial, log_sum, rows, other)
    assert out.equal(other)
    merge_states(partial, log_sum, torch.tensor([[0, 1, 2]]), other)
    assert not out.equal(other)


def test_refused_where_it_cannot_run() -> None:
    with pytest.raises(ConfigError, match="attention_split = 2048 needs flash-attn-4"):
        attention_backend(128, torch.float32, CPU, split=2048)
    assert not attention_backend(128, torch.float32, CPU, split=0).has_splits
    sizes = {"num_pages": 1, "page_size": 16}
    with pytest.raises(ConfigError, match="needs flash-attn-4"):
        KvCache(kv_layers(1, 1, 16), **sizes, dtype=torch.float32, device=CPU, split=128)


@pytest.mark.parametrize("split", [100, -128])
def test_not_a_number_of_key_blocks(split: int) -> None:
    for config in (NativeEngineConfig, TrainerConfig):
        with pytest.raises(ConfigError, match=r"attention_split.*multiple of 128"):
            config(attention_split=split)
    with pytest.raises(ConfigError, match="multiple of 384"):
        NativeEngineConfig(attention_split=128, page_size=192)


def test_both_roles_must_agree() -> None:
    trainer, engine = (contract(CPU, torch.float32, 16, split) for split in (2048, 4096))
    assert "attention_split is 2048 in the first and 4096 in the second" in disagreement(
        {"trainer": trainer, "engine": engine}
    )
