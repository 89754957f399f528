"""Memory of a trainer of Megatron-core on one of its ranks: an estimate, from config and axes.

It is computed without torch and Megatron-core, for the plan. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.moe_spec import MoeSpec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.activation_memory import HeadShape, LayerShape, activations
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.moment_chunks import CHUNK_ELEMENTS, NUM_SLOTS
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
    dense, experts = own_parameters(spec, axes)
    own, shard = dense + experts, dense + experts
    if backend.distributed_optimizer:
        copies = placement.data_size * size_of(axes, "cp")
        shard = -(-dense // copies) + -(-experts // size_of(axes, "edp"))
    master = 0 if dtype == "float32" else shard * FP32_BYTES
    tp, cp, element_bytes = size_of(axes, "tp"), size_of(axes, "cp"), ITEM_BYTES[dtype]
    keeps_slopes = tp == 1 and not backend.recomputes_layers  # on a GPU, as scores.py does
    vocab = -(-spec.vocab_size // tp)
    kept = activations(
        _layer_shape(spec, tp),
        HeadShape(vocab, spec.hidden_size, logit_rows, max_tokens, keeps_slopes),
        num_tokens=-(-max_tokens // cp),
        num_layers=spec.num_layers,
        element_bytes=element_bytes,
        recompute="all" if backend.recomputes_layers else "none",
    )
    routed = _routed_elements(spec, backend, -(-max_tokens // (cp * tp))) * element_bytes
    return [
        TagBytes("master", own * (element_bytes + FP32_BYTES) + master, "save"),
        *_moments(backend, NUM_MOMENTS * shard * FP32_BYTES),
        TagBytes("activations", kept.peak + routed, "work"),
    ]


def _moments(backend: MegatronConfig, num_bytes: int) -> list[TagBytes]:
    """Return the moments, and the chunks in which they pass through the GPU from host memory."""
    if backend.offload == "none":
        return [TagBytes("moments", num_bytes, "save")]
    chunks = NUM_SLOTS * NUM_MOMENTS * CHUNK_ELEMENTS * FP32_BYTES
    return [
        TagBytes("moments", 0, "fixed", host_bytes=num_bytes),
        TagBytes("chunks", chunks, "work"),
    ]


def own_parameters(spec: ModelSpec, axes: Mapping[str, int]) -> tuple[int, int]:
    """Return how many parameters a rank has at most, cut along tp, pp and ep, and how many of
    experts. Other ranks hold copies of the two: those along the data and cp, and those along edp.
    """
    tp, pp, ep = (size_of(axes, axis) for axis in ("tp", "pp", "ep"))
    sizes = {name: prod(shape) for name, shape in spec.parameter_shapes().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    outer = sum(sizes.values()) - layers
    return -(-(layers - experts) // (pp * tp)) + -(-outer // tp), -(-experts // (pp * ep))


def _layer_shape(spec: ModelSpec, tp: int) -> LayerShape:
    """Return the sizes of a rank's share of a layer; norms and the residual stream are whole.

    A token of a mixture of experts goes through some of them, which are balanced here.
    """
    width = spec.intermediate_size
    if isinstance(spec, MoeSpec):
        width = spec.experts_per_token * spec.expert_size
    return LayerShape(
        spec.hidden_size,
        -(-width // tp),
        spec.num_heads * spec.head_dim // tp,
        -(-spec.num_kv_heads // tp) * spec.head_dim,
    )


def _routed_elements(spec: ModelSpec, backend: MegatronConfig, num_tokens: int) -> int:
    """Return the elements of the copies of tokens that go to experts, and of those that return."""
    if not isinstance(spec, MoeSpec):
        return 0
    num_layers = 1 if backend.recomputes_layers else spec.num_layers
    return 2 * num_layers * num_tokens * spec.experts_per_token * spec.hidden_size
