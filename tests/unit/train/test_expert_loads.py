"""Loads of experts as metrics, and the loss that balances them: of one layer that of transformers,
and of several the mean in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from spmd_rl.algo.losses import sft_loss
from spmd_rl.errors import ConfigError
from spmd_rl.kernels.moe.router import route
from spmd_rl.model.layers.expert_loads import ExpertLoads
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.expert_metrics import BALANCE_LOSS, load_metrics
from spmd_rl.train.megatron.config import MegatronConfig
from tests.dist.train_case import VOCAB, make_batch
from tests.unit.model.test_against_transformers import _gradients
from tests.unit.model.test_glm4_moe import BASE

QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 54,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}
NAMES = [f"experts/{one}{of}" for one in ("max_load", "entropy", "unused") for of in ("", "_worst")]


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 30), st.integers(0, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_the_loss_and_its_gradient_are_the_mean_over_layers(
    layers: int, experts: int, tokens: int, padding: int, data: Any
) -> None:
    chosen = data.draw(st.integers(1, experts))
    logits = [torch.randn(tokens + padding, experts, requires_grad=True) for _ in range(layers)]
    loads = ExpertLoads(tokens, balances=True)
    for one in logits:
        layer, ids = nn.Identity(), route(one, chosen, normalizes=True).ids
        loads.add(layer, one, ids)
        loads.add(layer, one, ids)  # computed again
    mine = torch.autograd.grad(loads.balance(), logits)
    theirs = sum(load_balancing_loss_func((one[:tokens],), experts, chosen) for one in logits)
    torch.testing.assert_close(loads.balance(), theirs / layers)
    expected = mean_in_float64(logits, tokens, chosen)
    torch.testing.assert_close(loads.balance().double(), expected, rtol=1e-5, atol=0)
    rounding = 1e-6 * experts / tokens  # a gradient is this scale times numbers below 1
    for one, other in zip(mine, torch.autograd.grad(expected, logits), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=rounding)
    assert loads.counts().sum() == layers * tokens * chosen


def mean_in_float64(logits: list[torch.Tensor], tokens: int, chosen: int) -> torch.Tensor:
    """Return the loss as its definition says it, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    for layer in logits:
        experts = layer.shape[1]
        probabilities = [row.double().softmax(-1) for row in layer[:tokens]]
        ids = [
            set(route(row[None], chosen, normalizes=True).ids[0].tolist()) for row in layer[:tokens]
        ]
        for expert in range(experts):
            share = sum(expert in one for one in ids) / tokens
            mean = sum(one[expert] for one in probabilities) / tokens
            total = total + experts * share * mean / len(logits)
    return total


@pytest.mark.parametrize("experts", [(0, 0), (0, 1)])
def test_layers_that_collapse_onto_different_experts_are_not_even(
    experts: tuple[int, int],
) -> None:
    loads = ExpertLoads(8, balances=True)
    for expert in experts:
        logits = torch.full((8, 2), -20.0)
        logits[:, expert] = 20.0
        loads.add(nn.Identity(), logits, torch.full((8, 1), expert))
    assert float(loads.balance()) == pytest.approx(2.0)


def test_metrics_by_hand() -> None:
    even = load_metrics(np.full((2, 4), 3.0))
    assert [even[name] for name in NAMES] == pytest.approx([1, 1, 1, 1, 0, 0])
    skewed = load_metrics(np.array([[3.0, 3, 3, 3], [6, 6, 0, 0], [9, 0, 0, 0]]))
    expected = [(1 + 2 + 4) / 3, 4, (1 + 0.5 + 0) / 3, 0, (0 + 0.5 + 0.75) / 3, 0.75]
    assert [skewed[name] for name in NAMES] == pytest.approx(expected)
    alone = load_metrics(np.array([[5.0]]))
    assert [alone[name] for name in NAMES] == [1, 1, 1, 1, 0, 0]


def write(folder: Path, config: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    reference = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    )
    for one in reference.parameters():
        one.data.normal_(std=0.2).add_(one.ndim == 1)
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("recompute", ["none", "cheap", "all"])
def test_a_step_learns_from_the_mean_over_layers(
    recompute: Any, tmp_path: Path, new_trainer: Callable[..., Any]
) -> None:
    reference, coef = write(tmp_path, QWEN), 0.3
    trainer = new_trainer(
        model=tmp_path,
        init="folder",
        lr=1e-3,
        clip_norm=0.0,
        max_tokens=4096,
        router_aux_loss_coef=coef,
        backend=Fsdp2Config(recompute=recompute),
    )
    batch = make_batch()
    batch = batch.select(np.arange(0, len(batch.lengths), 3))  # as samples share their prompt
    starts = np.cumsum(batch.lengths) - batch.lengths
    total, logits = torch.zeros(()), []
    for number, start in enumerate(starts):
        place = slice(start, start + batch.lengths[number])
        tokens = torch.from_numpy(batch.tokens[place]).long()
        out = reference(tokens[None, :-1], output_router_logits=True)  # the last predicts none
        logits.append(out.router_logits)
        scaled = out.logits[0] / float(batch.temperature[number] or 1.0)
        plain = scaled.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(batch.mask[place])[1:]
        total = total - plain[mask].sum() / batch.denominator
    pooled = tuple(torch.cat(of_layer) for of_layer in zip(*logits, strict=True))
    balance = sum(load_balancing_loss_func((one,), 6, 2) for one in pooled) / len(pooled)
    (total + coef * balance).backward()
    balance = float(balance.detach())
    expected = torch.stack([one.norm() for one in _gradients(reference).values()]).norm()
    stats = trainer.train_step(batch, sft_loss)
    assert stats[BALANCE_LOSS] == pytest.approx(balance, rel=1e-4)
    assert stats["train/grad_norm"] == pytest.approx(float(expected), rel=1e-4)
    assert set(NAMES) <= stats.keys()
    counts = np.stack(
        [np.bincount(route(one, 2, normalizes=True).ids.flatten(), minlength=6) for one in pooled]
    )
    assert {name: stats[name] for name in NAMES} == pytest.approx(load_metrics(counts * 1.0))


def test_it_is_off_by_default(tmp_path: Path, new_trainer: Callable[..., Any]) -> None:
    write(tmp_path, QWEN)
    stats = new_trainer(model=tmp_path, init="folder").train_step(make_batch(), sft_loss)
    assert BALANCE_LOSS not in stats
    assert set(NAMES) <= stats.keys()


def test_a_router_is_trained_or_frozen(tmp_path: Path, new_trainer: Callable[..., Any]) -> None:
    write(tmp_path, QWEN)
    for freeze in (), ("*.mlp.gate.weight",):
        trainer = new_trainer(
            model=tmp_path, init="folder", lr=1e-2, freeze=freeze, router_aux_loss_coef=0.1
        )
        before = {name: one.detach().clone() for name, one in trainer.backend.local.items()}
        trainer.train_step(make_batch(), sft_loss)
        moved = {
            name
            for name, one in trainer.backend.local.items()
            if not torch.equal(one, before[name])
        }
        routers = {name for name in before if name.endswith(".mlp.gate.weight")}
        assert len(routers) == 3
        assert moved & routers == (set() if freeze else routers)
        assert "model.layers.0.self_attn.q_proj.weight" in moved


def test_routers_without_a_softmax_are_refused(
    tmp_path: Path, new_trainer: Callable[..., Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ConfigError, match="glm4_moe has no routers with a softmax"):
        new_trainer(model=tmp_path, router_aux_loss_coef=0.1)
    with pytest.raises(ConfigError, match="'fsdp2' with router_aux_loss_coef"):
        TrainerConfig(router_aux_loss_coef=0.1, backend=MegatronConfig())
