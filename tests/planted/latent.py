"""A planted kind of layer that keeps one compressed vector of each token, and no keys or values.

Keys and values are made of that vector each time. Its module is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spmd_rl.kernels import Rotary, TokenAttention
from spmd_rl.model.layers.layer import (
    CacheSpec,
    LayerCost,
    PointDef,
    TensorSpec,
    num_elements,
)
from spmd_rl.model.linear import Linear


@dataclass(frozen=True)
class Latent:
    hidden_size: int
    latent_size: int
    key_size: int
    name: str = "self_attn"

    def parameters(self) -> Sequence[TensorSpec]:
        shapes = {
            "query": (self.key_size, self.hidden_size),
            "down": (self.latent_size, self.hidden_size),
            "key": (self.key_size, self.latent_size),
            "value": (self.hidden_size, self.latent_size),
        }
        return [TensorSpec(f"{self.name}.{one}.weight", shape) for one, shape in shapes.items()]

    def cost(self, tp: int = 1) -> LayerCost:
        kept = 2 * self.key_size + self.latent_size + self.hidden_size
        weights = num_elements(self.parameters())
        return LayerCost(
            parameters=weights,
            multiplied=weights,
            kept_products=kept,
            gradients=kept,
            workspace=kept,
            flops_per_key=2 * (self.key_size + self.hidden_size),
            query_heads=1,
        )

    def cache(self, tp: int = 1) -> CacheSpec:
        return CacheSpec(((self.latent_size,),))

    def points(self) -> Sequence[PointDef]:
        return [
            PointDef(
                "latent",
                "compressed vector",
                (self.latent_size,),
                ("input_norm",),
                output_of=f"{self.name}.down",
                is_product=True,
            ),
            PointDef(
                "mixed",
                "attention to compressed vectors",
                (self.hidden_size,),
                ("latent", "input_norm"),
                output_of=self.name,
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        return LatentModule(self, number)


class LatentModule(nn.Module):
    def __init__(self, spec: Latent, number: int) -> None:
        super().__init__()
        self.number = number
        self.query = Linear(spec.hidden_size, spec.key_size, bias=False)
        self.down = Linear(spec.hidden_size, spec.latent_size, bias=False)
        self.key = Linear(spec.latent_size, spec.key_size, bias=False)
        self.value = Linear(spec.latent_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attend: TokenAttention) -> Tensor:
        queries, parts = self.query(x), []
        for new, (latents,) in attend.history(self.number, self.down(x)):
            keys, values = self.key(latents), self.value(latents)
            num_before = len(latents) - (new.stop - new.start)
            for place, query in enumerate(queries[new]):
                seen = slice(num_before + place + 1)
                weights = (keys[seen] * query).sum(-1).softmax(0)
                parts.append((weights[:, None] * values[seen]).sum(0))
        mixed = torch.stack(parts)
        return torch.cat([mixed, mixed.new_zeros(len(x) - len(mixed), mixed.shape[1])])
