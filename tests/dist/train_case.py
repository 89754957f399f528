"""One small training problem, the same wherever it is built: a random model folder and random
batches.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from spmd_rl.algo.advantages import group_advantage
from spmd_rl.algo.packing import Aggregation, pack
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.weights.local_tensors import LocalTensor

VOCAB = 50


def write_model_folder(folder: Path) -> Path:
    """A Qwen3-shaped config; 3 layers and odd sizes, so that FSDP's chunks are uneven."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 36,
        "intermediate_size": 54,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_sizes(folder: Path, **facts: object) -> Path:
    """Have a model's config say other facts."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return folder


def write_mixture_folder(folder: Path, num_experts: int = 8) -> Path:
    """The same model with experts in place of its MLPs.

    All shards of experts are multiples of 32 elements, as AdamW on a CPU rounds a rest otherwise.
    """
    return with_sizes(
        write_model_folder(folder),
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=num_experts,
        num_experts_per_tok=3,
        hidden_size=32,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    )


def write_glm_folder(folder: Path) -> Path:
    """A mixture of another family: its routers have sigmoids, and every token takes one expert
    more.
    """
    return with_sizes(
        write_mixture_folder(folder),
        model_type="glm4_moe",
        architectures=["Glm4MoeForCausalLM"],
        n_routed_experts=8,
        n_group=2,
        topk_group=2,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
        head_dim=8,
    )


def local_weights(trainer: Trainer) -> dict[str, LocalTensor]:
    """The trainer's own memory of its weights on this rank."""
    return dict(trainer.backend.state()["weights"])


def make_groups(
    seed: int = 0, num_groups: int = 6, num_samples: int = 3, version: int = 0, longest: int = 30
) -> list[Group]:
    rng = np.random.default_rng(seed)

    def sample(uid: int, index: int) -> Sample:
        size = int(rng.integers(1, longest))
        tokens = rng.integers(0, VOCAB, size).astype(np.int32)
        roll = rng.normal(-3, 0.5, size).astype(np.float32)
        versions = np.full(size, version, np.int32)
        return Sample(
            uid,
            index,
            tokens,
            roll,
            versions,
            "completed",
            (0.7, 1.0, 0.0)[uid % 3],
            reward=float(rng.random()),
        )

    return [
        Group(
            Prompt(uid, rng.integers(0, VOCAB, int(rng.integers(1, 12))).astype(np.int32)),
            [sample(uid, i) for i in range(num_samples)],
        )
        for uid in range(num_groups)
    ]


def make_batch(seed: int = 0, aggregation: Aggregation = "token", **sizes: int) -> Batch:
    groups = make_groups(seed, **sizes)
    return pack(groups, group_advantage(groups), aggregation=aggregation, max_response_tokens=40)
