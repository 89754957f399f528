"""A decoder layer that `transformers` computes, as far as others need to know it. No torch.

What it costs is estimated by the shapes of its parameters, each of which counts as a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from spmd_rl.errors import ConfigError
from spmd_rl.model.layers.layer import CacheSpec, LayerCost, PointDef, TensorSpec, num_elements

if TYPE_CHECKING:
    from torch import nn

ALONE = "ranks do not share the layers of a model that transformers computes"


@dataclass(frozen=True)
class ForeignLayer:
    """All of a layer, by the names of its parameters within it, or nothing."""

    tensors: tuple[TensorSpec, ...] = ()
    heads: int = 0
    size: int = 0  # of a head
    key_heads: int = 0

    @classmethod
    def of(cls, config: Any, tensors: tuple[TensorSpec, ...]) -> ForeignLayer:
        """Return a layer of a model with this config of `transformers`; without heads, one that
        keeps as much of a token as one head of all its elements would.
        """
        heads = getattr(config, "num_attention_heads", None) or 1
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(tensors, heads, size, key_heads)

    @property
    def name(self) -> str:
        return "layer"

    def parameters(self) -> Sequence[TensorSpec]:
        return self.tensors

    def cost(self, tp: int = 1) -> LayerCost:
        matrices = [one for one in self.tensors if len(one.shape) > 1]
        outputs = sum(one.shape[-2] for one in matrices)
        return LayerCost(
            parameters=num_elements(self.tensors),
            multiplied=num_elements(matrices),
            kept_products=outputs,
            kept_cheap=outputs,
            gradients=outputs,
            workspace=outputs,
            flops_per_key=4 * self.heads * self.size,
            query_heads=self.heads,
        )

    def cache(self, tp: int = 1) -> CacheSpec | None:
        return CacheSpec(((self.key_heads, self.size),) * 2)

    def part(self, tp: int) -> NoReturn:
        raise ConfigError(ALONE)

    def points(self) -> Sequence[PointDef]:
        return ()

    def module(self, number: int) -> nn.Module:
        raise ConfigError("transformers computes this model, and our own network alone runs here")
