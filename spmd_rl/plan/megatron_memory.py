"""Memory of a trainer of Megatron-core on one of its ranks: an estimate, from config and axes."""

from __future__ import annotations

from math import prod

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import FP32_BYTES, Entry, Ledger, activation_bytes
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.weights.layout import ITEM_BYTES


def megatron_ledger(
    spec: ModelSpec, cfg: TrainerConfig, backend: MegatronConfig, placement: Placement, dtype: str
) -> Ledger:
    """Return the ledger of a rank, with the largest share that one has.

    Weights and gradients have buffers that stay. The first stage of a pipeline keeps what all of
    its layers need for as many micro-batches as there are stages, which is once the whole model.
    """
    axes = placement.axes
    tp, pp, cp, ep = (axes.get(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
    sizes = {name: prod(shape) for name, shape in spec.parameter_shapes().items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = sum(size for name, size in sizes.items() if name.startswith("model.layers."))
    outer = sum(sizes.values()) - layers
    dense = -(-(layers - experts) // (pp * tp)) + -(-outer // tp)
    own = dense + -(-experts // (pp * ep))
    sharded = placement.data_size * cp if backend.distributed_optimizer else 1
    shard = -(-own // sharded)
    return Ledger(
        (
            Entry("weights", own * ITEM_BYTES[dtype]),
            Entry("grads", own * FP32_BYTES),
            Entry("master", 0 if dtype == "float32" else shard * FP32_BYTES),
            Entry("moments", 2 * shard * FP32_BYTES),
            Entry("activations", _activations(spec, cfg, backend, tp, cp, dtype), ("train",)),
        )
    )


def _activations(
    spec: ModelSpec, cfg: TrainerConfig, backend: MegatronConfig, tp: int, cp: int, dtype: str
) -> int:
    recomputes = backend.model_options.get("recompute_granularity") == "full"
    return activation_bytes(
        num_tokens=-(-cfg.max_tokens // cp),
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=-(-spec.intermediate_size // tp),
        attention_width=(spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim // tp,
        logit_bytes=cfg.logit_rows * spec.vocab_size // tp * FP32_BYTES,
        slope_bytes=0,
        element_bytes=ITEM_BYTES[dtype],
        recompute="all" if recomputes else "none",
    )
