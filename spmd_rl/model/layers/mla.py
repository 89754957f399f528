"""Multi-head latent attention: keys and values of all heads are made of one latent of a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from spmd_rl.errors import ConfigError
from spmd_rl.model.layers.layer import (
    CacheSpec,
    LayerCost,
    PointDef,
    TensorSpec,
    num_elements,
    product,
    weights_of,
)

if TYPE_CHECKING:
    from torch import nn

LATENT = "kv_a_proj_with_mqa"
# beside those of other attention; `kv_b_proj` is none, for its product is never made
PROJECTIONS = ("q_a_proj", "q_b_proj", LATENT)


@dataclass(frozen=True)
class Mla:
    """Attention of `num_heads` queries to one key of a token: its latent, beside a rotary part.

    The projection from latents to keys and values is absorbed: queries are multiplied with that of
    keys before attention, and what attention gives with that of values. Trainer and engine both do
    so, because the other form has other bits. With `query_rank`, queries come from a latent too.
    `scale` multiplies scores. With `interleaved`, neighbours of a rotary part are pairs.
    Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.1 and appendix C.
    """

    hidden_size: int
    num_heads: int
    latent_dim: int
    query_rank: int
    plain_dim: int  # of a head of queries and keys, what is not rotated
    rotary_dim: int
    value_dim: int
    scale: float
    interleaved: bool
    bias: bool
    name: str = "self_attn"

    @property
    def query_width(self) -> int:
        return self.num_heads * (self.plain_dim + self.rotary_dim)

    @property
    def key_dim(self) -> int:
        """The size of the key that is cached, and of a query that is compared with it."""
        return self.latent_dim + self.rotary_dim

    @property
    def query_projections(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the projections to queries, in the module's order."""
        if not self.query_rank:
            return {"q_proj": (self.query_width, self.hidden_size)}
        return {
            "q_a_proj": (self.query_rank, self.hidden_size),
            "q_b_proj": (self.query_width, self.query_rank),
        }

    def parameters(self) -> Sequence[TensorSpec]:
        own, values = self.name, self.num_heads * self.value_dim
        both = self.num_heads * self.plain_dim + values
        found: list[TensorSpec] = []
        for projection, (rows, columns) in self.query_projections.items():
            is_first = projection == "q_a_proj"
            found += weights_of(f"{own}.{projection}", rows, columns, self.bias and is_first)
            if is_first:
                found.append(TensorSpec(f"{own}.q_a_layernorm.weight", (rows,)))
        hidden = self.hidden_size
        return [
            *found,
            *weights_of(f"{own}.{LATENT}", self.key_dim, hidden, self.bias),
            TensorSpec(f"{own}.kv_a_layernorm.weight", (self.latent_dim,)),
            TensorSpec(f"{own}.kv_b_proj.weight", (both, self.latent_dim), stays_full=True),
            *weights_of(f"{own}.o_proj", hidden, values, self.bias, writes_residual=True),
        ]

    def cost(self, tp: int = 1) -> LayerCost:
        latents, keys = self.num_heads * self.latent_dim, self.num_heads * self.key_dim
        around = self.query_width + self.num_heads * self.value_dim  # in heads of their own
        return LayerCost(
            parameters=num_elements(self.parameters()),
            multiplied=num_elements([one for one in self.parameters() if len(one.shape) == 2]),
            kept_products=self.query_rank + self.key_dim + latents + around,
            kept_cheap=keys + latents + self.key_dim,
            gradients=2 * keys + latents + around,
            workspace=2 * keys + latents + around,
            flops_per_key=2 * (keys + latents),
            query_heads=self.num_heads,
        )

    def cache(self, tp: int = 1) -> CacheSpec:
        key = 1, self.key_dim
        return CacheSpec((key,), queries_per_key=self.num_heads, latent_dim=self.latent_dim)

    def part(self, tp: int) -> Mla:
        if tp > 1:
            raise ConfigError(
                f"{tp} ranks cannot share attention to latents: set split.train.tp, "
                "split.infer.tp and run.row_shards to 1"
            )
        return self

    def points(self) -> Sequence[PointDef]:
        queries, key = (self.num_heads, self.key_dim), (1, self.key_dim)
        latents = self.num_heads, self.latent_dim
        widths = {name: rows for name, (rows, _) in self.query_projections.items()}
        last = list(widths)[-1]
        found = [
            product(self.name, one, "projection to queries", (rows,), "input_norm")
            for one, rows in widths.items()
            if one != "q_b_proj"
        ]
        if last == "q_b_proj":
            found.append(
                PointDef(
                    last,
                    "projection from a latent to queries",
                    (widths[last],),
                    ("q_a_proj",),
                    output_of=f"{self.name}.{last}",
                )
            )
        # what these are computed of is no whole head, so no variant explains them
        taken = {
            "q": ("queries of latents, as attention takes them", queries),
            "k": ("latents with their rotary part, as attention takes them", key),
            "v": ("latents, as attention adds them", (1, self.latent_dim)),
        }
        return [
            *found,
            product(self.name, LATENT, "projection to the latent", (self.key_dim,), "input_norm"),
            *(PointDef(op, words, shape) for op, (words, shape) in taken.items()),
            PointDef("attention", "causal attention to latents", latents, ("q", "k", "v")),
            PointDef(
                "o_proj",
                "output projection of attention",
                (self.hidden_size,),
                ("attention",),
                output_of=f"{self.name}.o_proj",
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        from spmd_rl.model.layers.mla_module import LatentAttention

        sizes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        return LatentAttention(number, **sizes)
