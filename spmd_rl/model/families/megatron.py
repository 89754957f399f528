"""Parameters of a model in Megatron-core: which boxes of Hugging Face tensors a rank holds."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from spmd_rl.model.families.megatron_layers import EXPERT, block_rules
from spmd_rl.model.families.rules import Joined, Part
from spmd_rl.model.held.tensor import Seat
from spmd_rl.model.layers.block import BlockSpec
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.spec import EMBEDDING, HEAD, NORM, ModelSpec, block_prefix

LAYERS = "decoder.layers."
EXPERTS = ".mlp.experts."
WORD_EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"
# of the local spec, then of transformer-engine's
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))"
)


def parts_of(spec: ModelSpec, parameter: str, layer: int, seat: Seat) -> list[Part]:
    """Return what a parameter of Megatron-core holds on a rank, in the order of its rows.

    A name that both layer specs of Megatron-core have means the same in both; others belong to one
    of them. `layer` is the layer's number in the whole model, which the parameter's own name lacks
    under pipeline parallelism. Raises: KeyError for a name that the model lacks.
    """
    if not parameter.startswith(LAYERS):
        outer = {one.name: one for one in spec.outer_parameters()}
        names = {WORD_EMBEDDING: EMBEDDING, FINAL_NORM: NORM}
        names[OUTPUT] = EMBEDDING if spec.tie_embeddings else HEAD
        return list(Joined(names[parameter]).parts(outer, seat.tp))
    *_, inner = parameter.split(".", 3)
    block = spec.blocks[layer]
    prefix = block_prefix(layer)
    if found := _EXPERT.fullmatch(inner):
        assert isinstance(block.mlp, Moe)
        first, _ = seat.ep.of(block.mlp.num_experts)
        expert = f"{block.mlp.name}.experts.{first + int(found[1] or found[4])}."
        rule, tensors = EXPERT[found[2] or found[3]], _within(expert, block)
        parts, prefix = rule.parts(tensors, seat.etp), prefix + expert
    else:
        parts = block_rules(block)[inner].parts(_within("", block), seat.tp)
    return [replace(part, name=prefix + part.name) for part in parts]


@lru_cache(1024)
def _within(prefix: str, block: BlockSpec) -> dict[str, TensorSpec]:
    """Return a block's tensors whose names begin with `prefix`, by the rest of the name."""
    return {
        one.name.removeprefix(prefix): one
        for one in block.parameters()
        if one.name.startswith(prefix)
    }
