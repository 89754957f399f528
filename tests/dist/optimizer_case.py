"""Whole matrices and vectors with gradients of many steps, the same wherever they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from spmd_rl.train.config import OptimizerConfig, ParameterGroup, TrainerConfig
from spmd_rl.weights.local_tensors import LocalTensor
from spmd_rl.weights.plan.layout import chunk_box

STEPS = 5
# 3 rows on 2 ranks are uneven, 1 row leaves a rank without any, and 5 matrices are 2.5 rounds
SHAPES = {
    "model.embed_tokens.weight": (9, 8),
    "model.layers.0.self_attn.q_proj.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.bias": (10,),
    "model.layers.0.self_attn.k_proj.weight": (3, 8),
    "model.layers.0.self_attn.v_proj.weight": (1, 8),
    "model.layers.0.mlp.up_proj.weight": (24, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.norm.weight": (8,),
}
BLOCKS = {  # of which one fits moments in 8 bits
    "model.layers.0.mlp.up_proj.weight": (80, 128),
    "model.layers.0.mlp.up_proj.bias": (80,),
    "model.norm.weight": (128,),
}
GROUPS = (
    ParameterGroup("*up_proj*", lr_scale=2.0),
    ParameterGroup("*bias", lr_scale=0.5, weight_decay=0.3),
)


def config(kind: str, **options: object) -> TrainerConfig:
    optimizer = OptimizerConfig(kind, **options)
    return TrainerConfig(
        optimizer=optimizer, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, groups=GROUPS
    )


def rate(step: int) -> float:
    """A schedule: the optimizer is told its rate at every step."""
    return 0.02 / (1 + step)


def weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    """Yield the gradients of each step."""
    for step in range(STEPS):
        yield weights(shapes, seed=1 + step)


def shards(
    shapes: Mapping[str, tuple[int, ...]], rank: int, num_ranks: int, device: str | torch.device
) -> dict[str, LocalTensor]:
    """The first weights, sharded as FSDP2 shards them."""
    found = {}
    for name, whole in weights(shapes).items():
        box = chunk_box(shapes[name], rank, num_ranks)
        local = nn.Parameter(rows(whole, rank, num_ranks).to(device, copy=True))
        found[name] = LocalTensor(shapes[name], box, local)
    return found


def rows(whole: Tensor, rank: int, num_ranks: int) -> Tensor:
    box = chunk_box(tuple(whole.shape), rank, num_ranks)
    return whole.narrow(0, box.offset[0], box.extent[0])
