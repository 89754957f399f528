"""Parts of a model on several ranks: the logits of the whole, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.errors import ConfigError
from spmd_rl.kernels import PackedAttention
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart, check_parts, row_shards_of_run
from spmd_rl.model.spec import ModelSpec
from tests.shared_ranks import NormExchange, on_ranks, part_of_model, parts
from tests.specs import dense_spec

CPU = torch.device("cpu")


def spec_of(family: str, num_kv_heads: int, vocab: int = 104, row_shards: int = 1) -> ModelSpec:
    spec = dense_spec(
        family,
        vocab=vocab,
        hidden=32,
        inner=48,
        layers=2,
        heads=(8, num_kv_heads, 8),
        positions=64,
        tie_embeddings=family == "qwen3",
        qkv_bias=family == "qwen2",
        out_bias=family == "llama",
        mlp_bias=family == "llama",
        qk_norm=family == "qwen3",
        init_std=0.3,
    )
    return replace(spec, row_shards=row_shards)


def weights_of(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Random weights, and biases that are not zero."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(random_weights(spec, seed))
    for name, one in weights.items():
        if name.endswith("bias"):
            one.normal_(std=0.3, generator=generator)
    return weights


def logits(model: CausalLM, tokens: Tensor, lengths: list[int]) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    attend = PackedAttention(np.array(lengths, np.int32), device=CPU)
    with torch.no_grad():
        return model(tokens, positions, attend, torch.arange(len(tokens)))


@settings(max_examples=10, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "qwen2", "llama"]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    vocab=st.sampled_from([60, 93, 104]),
    row_shards=st.sampled_from([2, 4, 8]),
    log_ranks=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_ranks_have_the_logits_of_one(
    family: str,
    num_kv_heads: int,
    vocab: int,
    row_shards: int,
    log_ranks: int,
    lengths: list[int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    """With more ranks than heads of keys, several have the same."""
    num_ranks = min(2**log_ranks, row_shards)
    spec = spec_of(family, num_kv_heads, vocab, row_shards)
    check_parts(spec, num_ranks, "tp")
    weights = weights_of(spec, seed)
    tokens = torch.randint(0, vocab, (sum(lengths),))
    whole = CausalLM(spec).to(dtype)
    whole.load_state_dict(weights)
    of_ranks = parts(num_ranks)

    def of_rank(rank: int) -> Tensor:
        return logits(part_of_model(spec, weights, of_ranks[rank]).to(dtype), tokens, lengths)

    expected = logits(whole, tokens, lengths)
    for found in on_ranks(of_rank, num_ranks):
        assert torch.equal(found, expected)
        assert found.is_contiguous()  # as kernels take them
    plain = CausalLM(replace(spec, row_shards=1))
    plain.load_state_dict(weights)
    if dtype == torch.float32:
        torch.testing.assert_close(expected, logits(plain, tokens, lengths), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_norms_take_every_sum_in_front_of_them(family: str) -> None:
    spec = spec_of(family, 2, row_shards=4)
    weights, tokens = weights_of(spec, 3), torch.arange(20)
    whole, of_ranks = CausalLM(spec), parts(2, kind=NormExchange)
    whole.load_state_dict(weights)
    models = [part_of_model(spec, weights, part) for part in of_ranks]
    expected = logits(whole, tokens, [20])
    for found in on_ranks(lambda rank: logits(models[rank], tokens, [20]), 2):
        assert torch.equal(found, expected)
    for part in of_ranks:
        exchange = part.exchange
        assert isinstance(exchange, NormExchange)
        assert (exchange.num_normed, exchange.num_taken) == (2 * len(spec.blocks), 0)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_boxes_cover_a_model(num_ranks: int, num_kv_heads: int) -> None:
    spec = spec_of("llama", num_kv_heads, vocab=93, row_shards=num_ranks)
    shapes = spec.parameter_shapes()
    covered = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rank in range(num_ranks):
        part = ModelPart(rank, num_ranks)
        with torch.device("meta"):
            model = CausalLM(spec, part=part)
        held = {name: tuple(one.shape) for name, one in model.named_parameters()}
        boxes = part.boxes(spec)
        assert held == {name: box.extent for name, box in boxes.items()}
        for name, box in boxes.items():
            index = tuple(slice(*ends) for ends in zip(box.offset, box.end, strict=True))
            covered[name][index] += 1
    assert all(one.min() > 0 for one in covered.values())
    assert covered["model.layers.0.mlp.down_proj.weight"].max() == 1
    keys = covered["model.layers.0.self_attn.k_proj.weight"]
    assert keys.max() == max(num_ranks // num_kv_heads, 1)


def test_a_fact_of_the_contract_says_in_how_many_parts_sums_are() -> None:
    plain, cut = (CausalLM(spec_of("qwen3", 2, row_shards=shards)) for shards in (1, 2))
    facts = [one.contract(CPU, torch.float32) for one in (plain, cut)]
    assert "row_shards=1" in str(facts[0]["model"])
    different = {name for name in facts[0] if facts[0][name] != facts[1][name]}
    assert different == {"model"}


@pytest.mark.parametrize(
    ("spec", "num_ranks", "words"),
    [
        (spec_of("qwen3", 2), 3, "2, 4 or 8 ranks"),
        (spec_of("qwen3", 2), 16, "2, 4 or 8 ranks"),
        (spec_of("qwen3", 2, vocab=9), 8, "without one of the 9 tokens"),
        (dense_spec("qwen3", vocab=99, hidden=32, inner=46, layers=1, heads=(4, 2, 8),
                    positions=9), 4, "46 hidden units"),
        (dense_spec("qwen3", vocab=99, hidden=32, inner=48, layers=1, heads=(6, 6, 8),
                    positions=9), 4, "6 attention heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused(spec: ModelSpec, num_ranks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^split\.infer\.tp = {num_ranks}.*{words}"):
        check_parts(spec, num_ranks, f"split.infer.tp = {num_ranks}")


def test_a_recorded_run_says_how_its_models_sum() -> None:
    split = {"split": {"infer": {"tp": 4}}}
    assert row_shards_of_run(split) == 4
    assert row_shards_of_run(split | {"engine": {"kind": "sglang"}}) == 1
    shared = {"split": {"infer": {"tp": 2}, "train": {"tp": 8}}}
    assert row_shards_of_run(shared) == 8
    of_others = {"trainer": {"backend": {"kind": "megatron", "layers": "transformer_engine"}}}
    assert row_shards_of_run(shared | of_others) == 2
    assert row_shards_of_run(shared | {"trainer": {"backend": {"kind": "megatron"}}}) == 8
    assert row_shards_of_run({}) == 1
    of_both = {"split": {"train": {"tp": 8}, "infer": {"tp": 4}}}
    assert row_shards_of_run(of_both) == 8
