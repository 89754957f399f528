"""Memory of a trainer of Megatron-core on one of its ranks: an estimate, from config and axes.

It is computed without torch and Megatron-core, for the plan. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.layers.layer import num_elements
from spmd_rl.model.parts.part import num_own_parts
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.cost.activation_memory import HeadShape, activations
from spmd_rl.train.cost.step_memory import CHUNKS_BYTES, NUM_MOMENTS, moments_tag
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.optimizer.parameter_groups import FP32_BYTES
from spmd_rl.weights.plan.layout import ITEM_BYTES


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
    own, shard = dense + experts, _with_state(backend, placement, dense, experts)
    master = 0 if dtype == "float32" else shard * FP32_BYTES
    tp, cp, element_bytes = size_of(axes, "tp"), size_of(axes, "cp"), ITEM_BYTES[dtype]
    # that a rank sends to experts; those along etp gather each other's
    num_tokens = -(-max_tokens // (cp * tp)) * size_of(axes, "etp")
    head = _head(spec, backend, -(-max_tokens // tp), logit_rows)
    shared = _shared(spec, head, tp, -(-max_tokens // cp), element_bytes)
    # norms and the residual stream are whole; a token's experts are balanced
    costs = [block.cost(tp) for block in spec.blocks]
    blocks = [replace(cost, routed=0) for cost in costs]  # whose copies are counted apart
    kept = activations(
        blocks,
        spec.hidden_size,
        head,
        num_tokens=-(-max_tokens // cp),
        element_bytes=element_bytes,
        recompute="all" if backend.recomputes_layers else "none",
    )
    routed_once = max(cost.routed for cost in costs)
    routed = routed_once if backend.recomputes_layers else sum(cost.routed for cost in costs)
    routed_bytes = routed * num_tokens * element_bytes
    return [
        TagBytes("master", own * (element_bytes + FP32_BYTES) + master, "save"),
        moments_tag(NUM_MOMENTS * shard * FP32_BYTES, backend.offload),
        TagBytes("chunks", CHUNKS_BYTES if backend.offload != "none" else 0, "work"),
        TagBytes("activations", kept.peak + shared + routed_bytes, "work"),
    ]


def _with_state(backend: MegatronConfig, placement: Placement, dense: int, experts: int) -> int:
    """Return of how many parameters a rank has the optimizer's state."""
    if not backend.distributed_optimizer:
        return dense + experts
    copies = placement.data_size * size_of(placement.axes, "cp")
    return -(-dense // copies) + -(-experts // size_of(placement.axes, "edp"))


def _head(spec: ModelSpec, backend: MegatronConfig, num_scored: int, logit_rows: int) -> HeadShape:
    """Return the head. Along tp each rank scores some of the tokens with all of it (scores.py)."""
    keeps_slopes = not backend.recomputes_layers  # on a GPU
    return HeadShape(spec.vocab_size, spec.hidden_size, logit_rows, num_scored, keeps_slopes)


def _shared(spec: ModelSpec, head: HeadShape, tp: int, num_tokens: int, element_bytes: int) -> int:
    """Return what sums and the head take at once: fp32 parts of the rank itself, along tp beside
    their sum, or as sent and as received; or the gathered head.
    """
    num_own = num_own_parts(spec, tp)
    num_parts = max(num_own + 1, 2) if tp > 1 else num_own
    gathered = head.weight_bytes(element_bytes) if tp > 1 else 0
    return max(gathered, num_parts * num_tokens * spec.hidden_size * FP32_BYTES)


def own_parameters(spec: ModelSpec, axes: Mapping[str, int]) -> tuple[int, int]:
    """Return how many parameters a rank has at most, cut along tp, pp, ep and etp, and how many of
    experts. Other ranks hold copies of the two: those along the data and cp, and those along edp.
    """
    tp, pp = size_of(axes, "tp"), size_of(axes, "pp")
    num_parts = pp * size_of(axes, "ep") * size_of(axes, "etp")  # of all experts
    tensors = [one for block in spec.blocks for one in block.parameters()]
    experts = num_elements([one for one in tensors if one.expert is not None])
    layers, outer = num_elements(tensors), num_elements(spec.outer_parameters())
    return -(-(layers - experts) // (pp * tp)) + -(-outer // tp), -(-experts // num_parts)
