"""Specification of a model that `transformers` computes, made of its network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from spmd_rl.model.foreign.network import decoder_layers, skeleton
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.foreign_layer import ForeignLayer
from spmd_rl.model.layers.layer import TensorSpec, num_elements
from spmd_rl.model.rope_spec import RopeSpec
from spmd_rl.model.spec import Head, ModelSpec

MOST_POSITIONS = 1 << 17  # where the config of a model names no limit


@dataclass(frozen=True)
class ForeignSpec(ModelSpec):
    """A `ModelSpec` whose parameters are those of a network of `transformers`.

    `tensors` are all of them; the names of those in layers begin with `layers`. Sizes of blocks are
    estimates.
    """

    tensors: tuple[TensorSpec, ...] = ()
    layers: str = ""

    @property
    def impl(self) -> str:
        return "transformers"

    @property
    def num_parameters(self) -> int:
        return num_elements(self.tensors)

    def parameters(self, head: Head = "lm") -> Iterator[TensorSpec]:
        yield from self.tensors

    def outer_parameters(self, head: Head = "lm") -> list[TensorSpec]:
        return [one for one in self.tensors if not one.name.startswith(self.layers)]

    def parameter_shapes(self, head: Head = "lm") -> dict[str, tuple[int, ...]]:
        return {one.name: one.shape for one in self.tensors}


def foreign_spec(model: str, eos_ids: tuple[int, ...]) -> ForeignSpec:
    """Return the specification of a model; `eos_ids` are those of its folder.

    Raises: ConfigError where transformers has no causal model for it.
    """
    network = skeleton(model)
    config, (name, layers) = network.config.get_text_config(), decoder_layers(network)
    return ForeignSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        max_positions=getattr(config, "max_position_embeddings", None) or MOST_POSITIONS,
        rms_eps=0.0,
        rope=RopeSpec(0, 0.0),
        tie_embeddings=bool(config.tie_word_embeddings),
        blocks=tuple(
            BlockSpec(config.hidden_size, ForeignLayer.of(config, _tensors(one)), ForeignLayer())
            for one in layers
        ),
        eos_ids=eos_ids,
        tensors=_tensors(network),
        layers=f"{name}.",
    )


def _tensors(module: nn.Module) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, tuple(one.shape)) for name, one in module.named_parameters())
