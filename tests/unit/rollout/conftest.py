"""Tiny random models, and the two things every exactness test needs: run an engine, score what it
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from spmd_rl.kernels import PackedAttention, sample_and_score, token_logprobs
from spmd_rl.kernels.vocab.kept_sets import KeptSets
from spmd_rl.model.hf import random_weights
from spmd_rl.model.network import CausalLM
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine
from spmd_rl.rollout.native.tp.head_draw import Sampler
from spmd_rl.types.kept_sets import set_ends
from spmd_rl.types.samples import Sample
from tests import samples
from tests.samples import Samples
from tests.specs import dense_spec

CPU = torch.device("cpu")


def _kept_sets(drawn: Sequence[Sample]) -> KeptSets:
    """The sets of all tokens, as the samples carry them."""
    data = b"".join(one.kept or bytes(len(one.tokens)) for one in drawn)
    array = np.frombuffer(bytearray(data), np.uint8)
    ends = set_ends(array)
    starts = np.concatenate([[0], ends[:-1]])
    return KeptSets(*map(torch.from_numpy, (array, starts, ends)))


def _spec(family: str, num_heads: int, num_kv_heads: int) -> ModelSpec:
    return dense_spec(
        family,
        vocab=37,
        hidden=32,
        inner=48,
        layers=2,
        heads=(num_heads, num_kv_heads, 8),
        positions=192,
        tie_embeddings=family == "qwen3",
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos_ids=(1,),
        init_std=0.3,
    )


@pytest.fixture(scope="session")
def new_model() -> Callable[..., CausalLM]:
    def build(
        family: str = "qwen3",
        num_heads: int = 4,
        num_kv_heads: int = 2,
        seed: int = 0,
        exponents: tuple[int, int] | None = None,
    ) -> CausalLM:
        spec = _spec(family, num_heads, num_kv_heads)
        model = CausalLM(spec, exponents=exponents)
        model.load_state_dict(dict(random_weights(spec, seed)))
        return model.requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def model(new_model: Callable[..., CausalLM]) -> CausalLM:
    return new_model()


@pytest.fixture(scope="session")
def new_engine() -> Callable[..., NativeEngine]:
    """An engine whose weights are version 0; keywords are NativeEngineConfig's."""

    def build(
        model: CausalLM,
        decode: Callable[[tuple[int, ...]], str] | None = None,
        sampler: Sampler = sample_and_score,
        **cfg: object,
    ) -> NativeEngine:
        cfg.setdefault("max_step_tokens", max(64, int(cfg.get("max_batch", 16))))
        engine = NativeEngine(
            model,
            NativeEngineConfig(**{"max_batch": 16, **cfg}),
            CPU,
            decode=decode,
            sampler=sampler,
        )
        engine.sink().commit(0)
        return engine

    return build


@pytest.fixture(scope="session")
def finish() -> Callable[..., Samples]:
    return samples.finish


@pytest.fixture(scope="session")
def mismatched_tokens() -> Callable[..., int]:
    """The gate: how many tokens of `samples` carry other bits than the packed training forward
    gives them.
    """

    def count(model: CausalLM, requests: Sequence[Request], samples: Samples) -> int:
        pairs = [(request, samples[request.uid, request.index]) for request in requests]
        tokens = [
            np.concatenate([request.prompt, sample.tokens]).astype(np.int64)
            for request, sample in pairs
        ]
        lengths = np.array([len(t) for t in tokens], dtype=np.int32)
        ends = np.cumsum(lengths)
        spec = model.spec
        attend = PackedAttention(lengths, device=CPU, exponents=model.exponents)
        positions = np.concatenate([np.arange(n) for n in lengths])
        rows = np.concatenate(
            [
                np.arange(end - len(s.tokens) - 1, end - 1)
                for end, (_, s) in zip(ends, pairs, strict=True)
            ]
        )
        warm = np.concatenate(
            [np.full(len(s.tokens), s.temperature, dtype=np.float32) for _, s in pairs]
        )
        targets = np.concatenate([s.tokens for _, s in pairs]).astype(np.int64)
        with torch.no_grad():
            logits = model(
                torch.from_numpy(np.concatenate(tokens)),
                torch.from_numpy(positions),
                attend,
                torch.from_numpy(rows),
            )
            scored, _ = token_logprobs(
                logits,
                torch.from_numpy(targets),
                1 / torch.from_numpy(warm),
                _kept_sets([s for _, s in pairs]).words(slice(None), spec.vocab_size),
            )
        recorded = torch.from_numpy(np.concatenate([s.logprobs for _, s in pairs]))
        return int((scored.view(torch.int32) != recorded.view(torch.int32)).sum())

    return count
