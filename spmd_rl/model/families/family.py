"""Family: the parameters of a kind of model in Megatron-core, and what each of them holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spmd_rl.model.families.rules import UNCUT, Cut, Part, Rows, Rule, Whole
from spmd_rl.model.moe_spec import MoeSpec
from spmd_rl.model.spec import EMBEDDING, HEAD, ModelSpec
from spmd_rl.weights.layout import Dims

LAYERS = "decoder.layers."
WORD_EMBEDDING = "embedding.word_embeddings.weight"
NORM = "model.norm.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
# of the local spec, then of transformer-engine's
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))"
)


@dataclass(frozen=True)
class Place:
    """A rank's place on the axes that cut parameters."""

    tensor: Cut = UNCUT  # tensor parallelism of all but the experts
    expert: Cut = UNCUT  # expert parallelism: which of the experts
    expert_tensor: Cut = UNCUT  # tensor parallelism within an expert


@dataclass(frozen=True)
class Family:
    """The parameters of a kind of model.

    `layer_rules` go by the name within a layer. A name that both layer specs of Megatron-core have
    means the same in both; others belong to one of them. `expert_rules` go by the name within an
    expert.
    """

    layer_rules: Callable[[ModelSpec], Mapping[str, Rule]]
    expert_rules: Mapping[str, Rule] | None = None

    def parts(self, spec: ModelSpec, parameter: str, layer: int, place: Place) -> list[Part]:
        """Return what a parameter of Megatron-core holds on a rank, in the order of its rows.

        `layer` is the layer's number in the whole model, which the parameter's own name lacks under
        pipeline parallelism. Raises: KeyError for a name that the family lacks.
        """
        if not parameter.startswith(LAYERS):
            outer: dict[str, Dims] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
            outer |= {HEAD: outer[EMBEDDING], NORM: (spec.hidden_size,)}
            return list(_outer_rules(spec)[parameter].parts(outer, place.tensor))
        *_, inner = parameter.split(".", 3)
        prefix = f"model.layers.{layer}."
        if found := _EXPERT.fullmatch(inner):
            assert isinstance(spec, MoeSpec) and self.expert_rules is not None
            first, _ = place.expert.of(spec.num_experts)
            prefix += f"mlp.experts.{first + int(found[1] or found[4])}."
            rule, shapes = self.expert_rules[found[2] or found[3]], spec.expert_shapes()
            parts = rule.parts(shapes, place.expert_tensor)
        else:
            rule = self.layer_rules(spec)[inner]
            parts = rule.parts(spec.layer_shapes(), place.tensor)
        return [replace(part, name=prefix + part.name) for part in parts]


def _outer_rules(spec: ModelSpec) -> dict[str, Rule]:
    """Return the rules of the parameters outside of the layers."""
    return {
        WORD_EMBEDDING: Rows(EMBEDDING),
        FINAL_NORM: Whole(NORM),
        OUTPUT: Rows(EMBEDDING if spec.tie_embeddings else HEAD),
    }
