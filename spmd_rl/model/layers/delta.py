"""Gated delta rule: a linear mixer, whose state a token decays, corrects and then reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd_rl.errors import ConfigError
from spmd_rl.model.layers.layer import (
    CacheSpec,
    LayerCost,
    PointDef,
    StateSpec,
    TensorSpec,
    num_elements,
    product,
)

if TYPE_CHECKING:
    from torch import nn

# the projections of a token, and the two that hold all of them per key head in Qwen3-Next
GATES = ("in_proj_b", "in_proj_a", "in_proj_ba")  # what states are corrected and decay by
PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
FUSED_PROJECTIONS = ("in_proj_qkvz", "in_proj_ba")
ALL_PROJECTIONS = (*PROJECTIONS, *FUSED_PROJECTIONS, "out_proj")
# arrays in fp32, each of all value heads, that exist at once where gradients are computed; counted
# on an H200 at the sizes of Qwen3.5-9B
IN_BACKWARD = 9


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule of `num_value_heads` states, each [key_head_dim, value_head_dim].

    A key head serves equally many value heads. Queries, keys and values pass a causal convolution
    over `conv_size` tokens. With `fused`, the folder has two projections in place of four.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_size: int
    rms_eps: float
    fused: bool = False
    name: str = "linear_attn"

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def projections(self) -> dict[str, int]:
        """Rows of each projection of a token, in the module's order."""
        conv, values, heads = self.conv_width, self.value_width, self.num_value_heads
        if self.fused:
            return dict(zip(FUSED_PROJECTIONS, (conv + values, 2 * heads), strict=True))
        return dict(zip(PROJECTIONS, (conv, values, heads, heads), strict=True))

    def parameters(self) -> Sequence[TensorSpec]:
        own, hidden, heads = self.name, self.hidden_size, self.num_value_heads
        out = TensorSpec(f"{own}.out_proj.weight", (hidden, self.value_width), writes_residual=True)
        return [
            TensorSpec(f"{own}.dt_bias", (heads,)),
            TensorSpec(f"{own}.A_log", (heads,)),
            *(
                TensorSpec(
                    f"{own}.{projection}.weight", (rows, hidden), stays_full=projection in GATES
                )
                for projection, rows in self.projections.items()
            ),
            TensorSpec(f"{own}.conv1d.weight", (self.conv_width, 1, self.conv_size)),
            TensorSpec(f"{own}.norm.weight", (self.value_head_dim,)),
            out,
        ]

    def cost(self, tp: int = 1) -> LayerCost:
        projected = sum(self.projections.values())
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim
        # in fp32, two elements each: what the convolution and the states give
        mixed = 2 * (self.conv_width + self.value_width)
        widest = self.num_value_heads * max(self.key_head_dim, self.value_head_dim)
        return LayerCost(
            parameters=num_elements(self.parameters()),
            # a token's key is multiplied with the state and added to it, and its query reads it
            multiplied=self.hidden_size * (projected + self.value_width) + 3 * state,
            kept_products=projected + 3 * self.value_width,
            gradients=projected + 2 * IN_BACKWARD * widest,
            workspace=projected + mixed + self.value_width,
        )

    def cache(self, tp: int = 1) -> CacheSpec:
        """Return the last rows before the convolution, and the states of the value heads."""
        rows = StateSpec((self.conv_size - 1, self.conv_width), is_wide=False)
        heads = self.num_value_heads, self.value_head_dim, self.key_head_dim
        return CacheSpec(states=(rows, StateSpec(heads, is_wide=True)))

    def part(self, tp: int) -> GatedDelta:
        if tp > 1:
            raise ConfigError(
                f"{tp} ranks cannot share a gated delta layer: set split.train.tp, split.infer.tp "
                "and run.row_shards to 1"
            )
        return self

    def points(self) -> Sequence[PointDef]:
        heads = (self.num_value_heads, self.value_head_dim)
        words = {
            "in_proj_qkv": "projection to queries, keys and values",
            "in_proj_z": "projection to the output's gate",
            "in_proj_b": "projection to how much each state is corrected",
            "in_proj_a": "projection to how much each state decays",
            "in_proj_qkvz": "projection to queries, keys, values and the output's gate",
            "in_proj_ba": "projection to how each state is corrected and decays",
        }
        return [
            *(
                product(self.name, projection, words[projection], (rows,), "input_norm")
                for projection, rows in self.projections.items()
            ),
            PointDef(
                "delta",
                "gated delta rule, normed and gated",
                heads,
                tuple(self.projections),
                source="input_norm",
                output_of=f"{self.name}.norm",
            ),
            product(
                self.name,
                "out_proj",
                "output projection of the gated delta rule",
                (self.hidden_size,),
                "delta",
                is_added=True,
            ),
        ]

    def module(self, number: int) -> nn.Module:
        from spmd_rl.kernels.delta.rule import DeltaHeads
        from spmd_rl.model.layers.delta_module import DeltaMixer

        return DeltaMixer(
            number,
            hidden_size=self.hidden_size,
            heads=DeltaHeads(
                self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
            ),
            projections=self.projections,
            fused=self.fused,
            conv_size=self.conv_size,
            rms_eps=self.rms_eps,
        )
