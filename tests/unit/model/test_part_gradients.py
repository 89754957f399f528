"""Gradients of parts of a model on several ranks: those of the whole model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmd_rl.kernels import PackedAttention
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.model.spec import ModelSpec
from tests.shared_ranks import on_ranks, part_of_model, parts
from tests.unit.model.test_parts import CPU, spec_of, weights_of

LENGTHS = [5, 30, 2]


def backward(model: CausalLM, tokens: Tensor, slopes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradients of their sum times `slopes`."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    attend = PackedAttention(np.array(LENGTHS, np.int32), device=CPU)
    logits = model(tokens, positions, attend, torch.arange(len(tokens)))
    (logits * slopes).sum().backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters()}  # type: ignore[misc]


def training(part: ModelPart) -> ModelPart:
    return replace(part, trains=True)


def gradients_of_ranks(
    spec: ModelSpec, weights: dict[str, Tensor], num_ranks: int, tokens: Tensor, slopes: Tensor
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    of_ranks = [training(part) for part in parts(num_ranks)]

    def of_rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        model = part_of_model(spec, weights, of_ranks[rank]).requires_grad_()
        return backward(model, tokens, slopes)

    return on_ranks(of_rank, num_ranks)


@settings(max_examples=8, deadline=None)
@given(
    family=st.sampled_from(["qwen3", "qwen2", "llama"]),
    vocab=st.sampled_from([60, 93, 104]),
    num_ranks=st.sampled_from([2, 4, 8]),
    seed=st.integers(0, 100),
)
def test_gradients_are_those_of_the_whole_model(
    family: str, vocab: int, num_ranks: int, seed: int
) -> None:
    spec = spec_of(family, 8, vocab, row_shards=8)
    weights = weights_of(spec, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (sum(LENGTHS),), generator=generator)
    slopes = torch.randn(len(tokens), vocab, generator=generator)
    whole = CausalLM(spec)
    whole.load_state_dict(weights)
    expected, gradients = backward(whole, tokens, slopes)
    found = gradients_of_ranks(spec, weights, num_ranks, tokens, slopes)
    for rank, (logits, own) in enumerate(found):
        assert torch.equal(logits, expected)
        part = ModelPart(rank, num_ranks, trains=True)
        for name, box in part.boxes(spec).items():
            grad = own[name]
            if box.extent == tuple(gradients[name].shape):
                grad = torch.stack([of_rank[name] for _, of_rank in found]).sum(0)
            wanted = gradients[name][tuple(map(slice, box.offset, box.end))]
            torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4, msg=name)


def test_a_row_of_the_embedding_keeps_its_signs() -> None:
    """Of zeros too, which sums with +0.0 would lose."""
    spec = spec_of("llama", 2, row_shards=2)
    weights = weights_of(spec, 0)
    table = weights["model.embed_tokens.weight"]
    table[:, ::2] = -0.0
    tokens = torch.arange(spec.vocab_size)
    of_ranks = [training(part) for part in parts(2)]

    def of_rank(rank: int) -> Tensor:
        return part_of_model(spec, weights, of_ranks[rank]).model._embedded(tokens)

    rows = torch.cat(on_ranks(of_rank, 2))
    assert torch.equal(rows.view(torch.int32), table.view(torch.int32))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_boxes_of_a_cut_embedding_are_those_of_the_head(num_ranks: int) -> None:
    spec = spec_of("llama", 4, vocab=93, row_shards=num_ranks)
    for rank in range(num_ranks):
        boxes = ModelPart(rank, num_ranks, trains=True).boxes(spec)
        assert boxes["model.embed_tokens.weight"] == boxes["lm_head.weight"]
