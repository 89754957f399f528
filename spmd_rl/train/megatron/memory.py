"""Memory of a trainer of Megatron-core on one of its ranks: an estimate, from config and axes.

It is computed without torch and Megatron-core, for the plan. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.activation_memory import HeadShape, LayerShape, Recompute, activations
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.parameter_groups import FP32_BYTES
from spmd_rl.weights.layout import ITEM_BYTES

NUM_MOMENTS = 2  # AdamW's


def megatron_memory(
    spec: ModelSpec,
    backend: MegatronConfig,
    placement: Placement,
    *,
    dtype: str,
    max_tokens: int,
    logit_rows: int,
) -> list[TagBytes]:
    """Return what a rank takes, by tag: the largest share that one has.

    Weights, the buffer of gradients and the float32 masters are under one tag, as they sleep. The
    first stage of a pipeline keeps what all of its layers need for as many micro-batches as there
    are stages, which is once the whole model.
    """
    axes = placement.axes
    own = own_parameters(spec, axes)
    sharded = placement.data_size * size_of(axes, "cp") if backend.distributed_optimizer else 1
    shard = -(-own // sharded)
    master = 0 if dtype == "float32" else shard * FP32_BYTES
    tp, cp, element_bytes = size_of(axes, "tp"), size_of(axes, "cp"), ITEM_BYTES[dtype]
    kept = activations(
        _layer_shape(spec, tp),
        HeadShape(-(-spec.vocab_size // tp), spec.hidden_size, logit_rows, max_tokens, False),
        num_tokens=-(-max_tokens // cp),
        num_layers=spec.num_layers,
        element_bytes=element_bytes,
        recompute=_recompute(backend),
    )
    moments = NUM_MOMENTS * shard * FP32_BYTES
    return [
        TagBytes("master", own * (element_bytes + FP32_BYTES) + master, "save"),
        TagBytes("moments", moments, "save")
        if backend.offload == "none"
        else TagBytes("moments", 0, "fixed", host_bytes=moments),
        TagBytes("activations", kept.peak, "work"),
    ]


def own_parameters(spec: ModelSpec, axes: Mapping[str, int]) -> int:
    """Return how many parameters a rank has at most, cut along tp, pp and ep."""
    tp, pp, ep = (size_of(axes, axis) for axis in ("tp", "pp", "ep"))
    sizes = {name: prod(shape) for name, shape in spec.parameter_shapes().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    outer = sum(sizes.values()) - layers
    return -(-(layers - experts) // (pp * tp)) + -(-outer // tp) + -(-experts // (pp * ep))


def _layer_shape(spec: ModelSpec, tp: int) -> LayerShape:
    """Return the sizes of a rank's share of a layer; norms and the residual stream are whole."""
    return LayerShape(
        spec.hidden_size,
        -(-spec.intermediate_size // tp),
        spec.num_heads * spec.head_dim // tp,
        -(-spec.num_kv_heads // tp) * spec.head_dim,
    )


def _recompute(backend: MegatronConfig) -> Recompute:
    return "all" if backend.model_options.get("recompute_granularity") == "full" else "none"
