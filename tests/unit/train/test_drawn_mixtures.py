"""Mixtures of shapes that no other test names: transformers' numbers, and the engine's bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.algo.packing import pack
from spmd_rl.model.hf import load_weights
from spmd_rl.model.layers.sigmoid_router import CORRECTION
from spmd_rl.model.network import CausalLM
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from tests.dist.train_case import VOCAB, make_batch
from tests.samples import finish
from tests.unit.model.test_against_transformers import _gradients, _logits

SEEDS = range(14)
ODD_TILES = [16, 48, 80, 112, 176]  # 16 divides them, and no larger power of two
ENGINE = NativeEngineConfig(page_size=4, max_batch=8, max_step_tokens=40, num_pages=200)


def drawn(seed: int) -> dict[str, Any]:
    """A config of one of the families, in turn."""
    draw = random.Random(seed)
    family = ("qwen3_moe", "glm4_moe")[seed % 2]
    sizes = ODD_TILES if draw.random() < 0.7 else [20, 36, 64, 100]
    kv_heads = draw.choice([1, 2, 3])
    size = draw.choice(sizes)
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": draw.choice(sizes),
        "intermediate_size": draw.choice(sizes),
        "moe_intermediate_size": size,
        "num_hidden_layers": draw.choice([2, 3]),
        "num_attention_heads": kv_heads * draw.choice([1, 2, 5]),
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([8, 16, 20]),
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": draw.random() < 0.7,
        "attention_bias": draw.random() < 0.5,
        "eos_token_id": 1,
    }
    if family == "qwen3_moe":
        count = draw.choice([1, 2, 3, 5, 13, 32, 33])
        chosen = min(count, draw.choice([1, 2, 3, 7, 8, 10]))
        return config | {"num_experts": count, "num_experts_per_tok": chosen}
    groups, in_group = draw.choice([1, 1, 2, 3, 5]), draw.choice([2, 3, 4, 7])
    of_groups = draw.randint(1, groups)
    return config | {
        "n_routed_experts": groups * in_group,
        "n_group": groups,
        "topk_group": of_groups,
        "num_experts_per_tok": draw.randint(1, of_groups * in_group),
        "n_shared_experts": draw.choice([1, 1, 2, 3]),
        "first_k_dense_replace": draw.choice([0, 1, 2]),
        "routed_scaling_factor": draw.choice([1.0, 2.5, 0.7]),
        "use_qk_norm": draw.random() < 0.5,
        "partial_rotary_factor": draw.choice([0.5, 0.5, 1.0]),
    }


def write(folder: Path, seed: int) -> Any:
    """Write a folder with weights, as transformers does; return its model."""
    torch.manual_seed(seed)
    raw = drawn(seed)
    config = transformers.AutoConfig.for_model(**raw)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, one in [*reference.named_parameters(), *reference.named_buffers()]:
        if one.requires_grad or name.endswith(CORRECTION):
            one.data.normal_(std=0.15).add_(one.ndim == 1 and name.endswith("norm.weight"))
    reference.save_pretrained(folder)
    return reference


def test_shapes_differ() -> None:
    configs = [json.dumps(drawn(seed), sort_keys=True) for seed in SEEDS]
    assert len(set(configs)) == len(configs)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_gradients_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    reference = write(tmp_path, seed)
    ours = CausalLM(read_spec(tmp_path))
    load_weights(ours, tmp_path)
    tokens = [torch.randint(0, VOCAB, (length,)) for length in (7, 1, 60)]
    pulls = [torch.randn(len(row), VOCAB) for row in tokens]
    theirs = [reference(row[None]).logits[0] for row in tokens]
    sum((one * pull).sum() for one, pull in zip(theirs, pulls, strict=True)).backward()
    found, expected = _logits(ours, tokens), torch.cat(theirs).detach()
    (found * torch.cat(pulls)).sum().backward()
    assert (found - expected).abs().max() <= 2e-5 * (1 + expected.abs().max())
    gradients = _gradients(reference)
    for name, one in ours.named_parameters():
        if not name.endswith(CORRECTION):
            # A router's gradient is a difference of products, and 0 for one expert a token.
            size = max(float(gradients[name].norm()), 5.0 * name.endswith(".gate.weight"))
            assert (one.grad - gradients[name]).norm() <= 2e-5 * size, name


@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_draws_the_trainers_bits(
    seed: int, tmp_path: Path, new_trainer: Callable[..., Any]
) -> None:
    write(tmp_path, seed)
    trainer, rng = new_trainer(model=tmp_path, init="folder"), np.random.default_rng(seed)
    trainer.train_step(make_batch(seed), grpo_loss)
    with torch.no_grad():
        model = CausalLM(read_spec(tmp_path)).requires_grad_(False)
        model.load_state_dict(
            {name: one.local.clone() for name, one in trainer.backend.state()["weights"]}
        )
    engine = NativeEngine(model, ENGINE, torch.device("cpu"))
    engine.sink().commit(1)
    prompts = [Prompt(uid, rng.integers(2, VOCAB, 2 + 5 * uid).astype(np.int32)) for uid in (0, 3)]
    sampling = SamplingConfig(num_samples=3, max_tokens=9, temperature=0.8, ignore_eos=True)
    wanted = [Request(one.uid, index, one.tokens, sampling) for one in prompts for index in (0, 1)]
    samples = finish(engine, wanted)
    groups = [
        Group(one, [replace(samples[one.uid, index], reward=float(index)) for index in (0, 1)])
        for one in prompts
    ]
    batch = pack(groups, group_advantage(groups))
    scored = trainer.score(batch).values
    assert batch.mask.sum() == 36
    np.testing.assert_array_equal(
        scored[batch.mask].view(np.int32), batch.rollout_logprobs[batch.mask].view(np.int32)
    )
