"""A decoder layer: norm, a layer that mixes tokens, norm, a layer that maps each token alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from spmd_rl.model.layers.layer import CacheSpec, LayerCost, LayerSpec, PointDef, TensorSpec

NORMS = ("input_layernorm", "post_attention_layernorm")
NUM_KEPT = 256  # blocks whose parameters and costs a process keeps
NORM_OPS = ("input_norm", "post_norm")  # their points
NORM_WORDS = ("residual add and norm before attention", "residual add and norm before the MLP")


@dataclass(frozen=True)
class BlockSpec:
    """The layers of a block of a decoder whose residual stream has `hidden_size` elements.

    Weights of its norms are `zero_centred` where one is added to them.
    """

    hidden_size: int
    mixer: LayerSpec
    mlp: LayerSpec
    zero_centred: bool = False

    @property
    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        return self.mixer, self.mlp

    def parameters(self) -> Sequence[TensorSpec]:
        """Return all parameters in the network's order, by their names within the block."""
        return _parameters(self)

    def cost(self, tp: int = 1) -> LayerCost:
        """Return the cost of the block on one of `tp` ranks that share it."""
        return _cost(self, tp)

    def cache(self, tp: int = 1) -> CacheSpec | None:
        """Return what one of `tp` ranks keeps of each token in pages; None for nothing."""
        return self.mixer.cache(tp)

    def part(self, tp: int) -> BlockSpec:
        """Return the block of one of `tp` ranks of an engine that share it. Raises: ConfigError."""
        return replace(self, mixer=self.mixer.part(tp), mlp=self.mlp.part(tp))

    def points(self) -> Iterator[PointDef]:
        """Yield the points in the order in which the forward pass reaches them."""
        for norm, op, words, layer in zip(NORMS, NORM_OPS, NORM_WORDS, self.layers, strict=True):
            yield PointDef(op, words, (self.hidden_size,), input_of=layer.name, norm=norm)
            yield from layer.points()

    def has_point(self, op: str) -> bool:
        return any(one.op == op for one in self.points())


# A model has many equal blocks, and a plan counts it many times.
@lru_cache(NUM_KEPT)
def _parameters(block: BlockSpec) -> tuple[TensorSpec, ...]:
    size, start = (block.hidden_size,), 1.0 - block.zero_centred
    norms = (TensorSpec(f"{norm}.weight", size, start=start) for norm in NORMS)
    return (*block.mixer.parameters(), *block.mlp.parameters(), *norms)


@lru_cache(NUM_KEPT)
def _cost(block: BlockSpec, tp: int) -> LayerCost:
    hidden = block.hidden_size
    layers = block.mixer.cost(tp) + block.mlp.cost(tp)
    whole = layers + LayerCost(
        parameters=2 * hidden,
        kept_inputs=2 * hidden,  # sums of the residual stream, one before each norm
        kept_cheap=2 * hidden,  # outputs of the norms
        workspace=4 * hidden,
    )
    return replace(whole, gradients=layers.gradients + 2 * hidden)
