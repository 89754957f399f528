"""A small model, requests that end, stop and wait all the time, and engines for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.types.samples import Sample
from tests.samples import Samples
from tests.specs import dense_spec

DEVICE = torch.device("cuda")
SPEC = dense_spec(
    "qwen3",
    vocab=4096,
    hidden=512,
    inner=1536,
    layers=3,
    heads=(8, 4, 64),
    positions=1024,
    theta=1e6,
    tie_embeddings=True,
    qk_norm=True,
    init_std=0.06,
)

USUAL = NativeEngineConfig(
    dtype="bfloat16", max_batch=24, page_size=128, max_step_tokens=256, num_pages=200
)


def new_model(seed: int = 0) -> CausalLM:
    model = CausalLM(SPEC)
    model.load_state_dict(dict(random_weights(SPEC, seed)))
    return model.to(DEVICE, torch.bfloat16).requires_grad_(False)


def workload() -> list[Request]:
    """Answers of 1 to 200 tokens, some cut short by a common token, some filtered, some greedy."""
    rng = np.random.default_rng(1)
    stem = rng.integers(2, SPEC.vocab_size, 400).astype(np.int32)
    kinds = [
        SamplingConfig(),
        SamplingConfig(stop_ids=tuple(range(100, 160))),
        SamplingConfig(temperature=0.7, top_k=50, top_p=0.9),
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=1.4, min_p=0.01, stop_ids=tuple(range(100))),
    ]
    return [
        Request(
            uid,
            index,
            stem[: 1 + 37 * uid % 300],
            replace(kinds[uid % len(kinds)], max_tokens=int(rng.integers(1, 200)), ignore_eos=True),
            seed=3,
        )
        for uid in range(12)
        for index in range(4)
    ]


def new_engine(model: CausalLM, cfg: NativeEngineConfig = USUAL) -> NativeEngine:
    engine = NativeEngine(model, cfg, DEVICE)
    engine.sink().commit(0)
    return engine


def inverse_temperatures(sample: Sample) -> Tensor:
    """Return what the logits of each token of a sample are multiplied with, in fp32."""
    inverse = np.float32(1) / np.float32(sample.temperature)
    return torch.full((len(sample.tokens),), float(inverse), device=DEVICE)


def unequal(samples: Samples, expected: Samples) -> int:
    assert samples.keys() == expected.keys()
    return sum(
        sample.tokens.tobytes() != expected[name].tokens.tobytes()
        or sample.logprobs.tobytes() != expected[name].logprobs.tobytes()
        or sample.kept != expected[name].kept
        or sample.status != expected[name].status
        for name, sample in samples.items()
    )
