"""Grouped-query attention: several query heads share a key-value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from spmd_rl.model.layers.layer import (
    CacheSpec,
    Cut,
    LayerCost,
    PointDef,
    TensorSpec,
    num_elements,
    product,
    weights_of,
)

if TYPE_CHECKING:
    from torch import nn

QKV = "qkv_proj"  # the product of the three projections as one
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FUSED = {QKV: PROJECTIONS[:3]}


@dataclass(frozen=True)
class Gqa:
    """Attention of `num_heads` queries to `num_kv_heads` keys and values, with rotary positions.

    With `qk_norm`, the heads of queries and keys are normed before they are rotated, by
    `zero_centred` weights where one is added to them. If it is `gated`, `q_proj` gives each head a
    gate after its query, whose sigmoid the output of attention is multiplied with. A query sees the
    last `window` keys, 0 for all; with `has_sinks`, each head has one more logit, without a value.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    zero_centred: bool = False
    gated: bool = False
    window: int = 0
    has_sinks: bool = False
    name: str = "self_attn"

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def query_width(self) -> int:
        """Rows of `q_proj`: the queries, and their gates."""
        return self.width * (1 + self.gated)

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def parameters(self) -> Sequence[TensorSpec]:
        hidden, own = self.hidden_size, self.name
        heads = Cut(0, self.num_heads, "attention heads")
        kv_heads = Cut(0, self.num_kv_heads, "key-value heads", repeats=True)
        columns = Cut(1, self.num_heads, "attention heads")
        q, k, v, o = (f"{own}.{projection}" for projection in PROJECTIONS)
        return [
            *weights_of(q, self.query_width, hidden, self.qkv_bias, cut=heads),
            *weights_of(k, self.kv_width, hidden, self.qkv_bias, cut=kv_heads),
            *weights_of(v, self.kv_width, hidden, self.qkv_bias, cut=kv_heads),
            *weights_of(o, hidden, self.width, self.out_bias, cut=columns, writes_residual=True),
            *(
                TensorSpec(f"{own}.{norm}.weight", (self.head_dim,), start=1.0 - self.zero_centred)
                for norm in ("q_norm", "k_norm")
                if self.qk_norm
            ),
            *(
                TensorSpec(f"{own}.sinks", (self.num_heads,), heads, stays_full=True, start=0.0)
                for _ in range(self.has_sinks)
            ),
        ]

    def cost(self, tp: int = 1) -> LayerCost:
        width, gates = self.width // tp, self.gated * self.width // tp
        kv_width = -(-self.num_kv_heads // tp) * self.head_dim
        # queries, keys and values as projected, and the output
        projected = 2 * width + 2 * kv_width + gates
        return LayerCost(
            parameters=num_elements(self.parameters()),
            multiplied=self.hidden_size * projected,
            kept_products=projected,
            # queries and keys, normed and rotated; gated output
            kept_cheap=width + kv_width + gates,
            gradients=projected,
            workspace=2 * (width + 2 * kv_width + gates),
            flops_per_key=4 * width,
            query_heads=self.num_heads // tp,
        )

    def cache(self, tp: int = 1) -> CacheSpec:
        heads = -(-self.num_kv_heads // tp)
        kv = heads, self.head_dim
        return CacheSpec((kv, kv), queries_per_key=self.num_heads // self.num_kv_heads)

    def part(self, tp: int) -> Gqa:
        num_kv_heads = max(self.num_kv_heads // tp, 1)
        return replace(self, num_heads=self.num_heads // tp, num_kv_heads=num_kv_heads)

    def points(self) -> Sequence[PointDef]:
        heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        shapes = {"q": heads, "k": kv_heads, "v": kv_heads}
        words = {"q": "query", "k": "key", "v": "value"}
        projections = [
            product(
                self.name,
                f"{one}_proj",
                f"{words[one]} projection",
                shapes[one],
                "input_norm",
                fused=QKV,
            )
            for one in "qkv"
        ]
        rotated = "as attention takes them: normed and turned"
        taken = {"q": f"queries, {rotated}", "k": f"keys, {rotated}", "v": "values"}
        return [
            *projections,
            *(
                PointDef(
                    one,
                    taken[one],
                    shapes[one],
                    (f"{one}_proj",),
                    source="input_norm",
                    norm=f"{self.name}.{one}_norm" if one != "v" else "",
                )
                for one in "qkv"
            ),
            PointDef("attention", "causal attention", heads, ("q", "k", "v")),
            product(
                self.name,
                "o_proj",
                "output projection of attention",
                (self.hidden_size,),
                "attention",
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        from spmd_rl.model.layers.gqa_module import Attention

        sizes = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "name"}
        return Attention(number, **sizes)
