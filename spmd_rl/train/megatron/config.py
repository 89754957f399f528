"""Settings of the Megatron-core backend, and what a model and a split must fit. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from spmd_rl.config.combinations import OFF, ON, Combination, above, equal, refuse
from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import MODEL, size_of
from spmd_rl.model.families.megatron_layers import require_known
from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.spec import ModelSpec

KEY = "trainer.backend"
OTHER_SUMS = (
    "transformer-engine's layers do not sum products as ranks that share a native engine do: set "
    "trainer.backend.layers = 'local'"
)
Layers = Literal["local", "transformer_engine"]


@dataclass(frozen=True)
class MegatronConfig:
    """Settings of the Megatron-core backend alone (docs/megatron.md)."""

    holds_whole_tensors: ClassVar[bool] = False  # it fuses them
    sends_along: ClassVar[tuple[str, ...]] = ()  # its connections are not counted
    wrap: ClassVar[Literal["auto"]] = "auto"  # of a frozen model with these log-probs

    kind: Literal["megatron"] = "megatron"  # which backend computes gradients
    # chunks of layers on each stage of a pipeline, which the stages take turns with
    chunks: int = 1
    # whose layers: ours within Megatron-core's, or transformer-engine's (on GPUs)
    layers: Layers = "local"
    sequence_parallel: bool = False  # split norms along tp by tokens
    # what lies in host memory: AdamW's moments, which each optimizer step streams through the GPU
    offload: Literal["none", "moments"] = "none"
    # shard the optimizer's state over the data axes and cp
    distributed_optimizer: bool = True
    # what brings rows to their experts: an all-to-all, or DeepEP (Megatron-core's flex dispatcher)
    ep_dispatcher: Literal["torch", "deep_ep"] = "torch"
    # Megatron-core's own, by the names of its TransformerConfig, such as
    # trainer.backend.model_options.recompute_granularity
    model_options: dict[str, Any] = field(default_factory=dict)
    # those of its OptimizerConfig, and of its DistributedDataParallelConfig
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    ddp_options: dict[str, Any] = field(default_factory=dict)

    @property
    def sums_in_parts(self) -> bool:
        """Whether layers sum as those of engines whose model ranks share."""
        return self.layers == "local"

    @property
    def recomputes_layers(self) -> bool:
        """Whether the backward pass computes whole layers again, and the head's logits."""
        return self.model_options.get("recompute_granularity") == "full"

    @property
    def recompute_choices(self) -> Mapping[Recompute, MegatronConfig]:
        """The config with each choice of FSDP2's recomputation: it has none of them."""
        return {}

    def describe(self) -> str:
        """Return a sentence for the start of a run."""
        whose = "its local layers" if self.layers == "local" else "transformer-engine's layers"
        return f"the trainer is Megatron-core with {whose} (docs/megatron.md)"

    def __post_init__(self) -> None:
        require(self.chunks >= 1, "chunks", self.chunks, "at least 1")
        for table, owned in OWNED.items():
            for name in getattr(self, table):
                if name in owned:
                    raise ConfigError(f"{KEY}.{table}.{name} is not yours to set: {owned[name]}")


_AXES = "the split sets it (split.train.tp, pp, cp, ep and etp)"
_MODEL = "the model's config.json sets it"
_RATE = "the trainer's own settings (trainer.lr, betas, eps, weight_decay) do"
OWNED: Mapping[str, Mapping[str, str]] = {
    "model_options": {
        **dict.fromkeys(
            (
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "context_parallel_size",
                "expert_model_parallel_size",
                "expert_tensor_parallel_size",
            ),
            _AXES,
        ),
        **dict.fromkeys(
            (
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "kv_channels",
                "normalization",
                "layernorm_epsilon",
                "qk_layernorm",
                "gated_linear_unit",
                "activation_func",
                "add_bias_linear",
                "add_qkv_bias",
                "num_moe_experts",
                "moe_ffn_hidden_size",
                "moe_router_topk",
            ),
            _MODEL,
        ),
        **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype"), "trainer.dtype does"),
        **dict.fromkeys(
            ("attention_dropout", "hidden_dropout"), "log-probs must not depend on a draw"
        ),
        "virtual_pipeline_model_parallel_size": f"{KEY}.chunks does",
        "sequence_parallel": f"{KEY}.sequence_parallel does",
        "calculate_per_token_loss": "losses are divided once, by the batch's denominator",
        "variable_seq_lengths": "micro-batches are packed sequences of any length",
        "finalize_model_grads_func": "the backend calls it after the schedule",
        "deterministic_mode": "trainer.deterministic does",
        "moe_aux_loss_coeff": "a loss that the recipe does not see would change the gradients",
    },
    "optimizer_options": {
        **dict.fromkeys(
            ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps"), _RATE
        ),
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), "trainer.dtype does"),
        "optimizer": "trainer.optimizer.kind does",
        "clip_grad": "trainer.clip_norm does",
        "use_distributed_optimizer": f"{KEY}.distributed_optimizer does",
    },
    "ddp_options": {
        "use_distributed_optimizer": f"{KEY}.distributed_optimizer does",
        "grad_reduce_in_fp32": "gradients are summed in float32",
        "use_megatron_fsdp": "trainer.backend.kind = 'fsdp2' shards weights",
    },
}


# what does not go together with this backend, with tables of a run as keys
REFUSED = (
    Combination(
        {f"{KEY}.sequence_parallel": ON, "split.train.tp": equal(1)},
        "{0.key} needs tensor parallelism: set {1.key}",
    ),
    Combination(
        {f"{KEY}.chunks": above(1), "split.train.pp": equal(1)},
        "{0} needs a pipeline: set {1.key}",
    ),
    Combination(
        {
            "split.train.pp": above(1),
            f"{KEY}.distributed_optimizer": ON,
            "model.tie_embeddings": ON,
        },
        "{0} with tied embeddings needs {1.key} = false: the two stages that hold the embedding "
        "would shard its state differently",
    ),
    Combination(
        {"split.train.etp": above(1), f"{KEY}.ep_dispatcher": equal("deep_ep")},
        '{0} does not go with {1.key} = "{1.value}": set it to "torch"',
    ),
    Combination(
        {f"{KEY}.ep_dispatcher": equal("deep_ep"), "split.train.ep": equal(1)},
        '{0.key} = "{0.value}" needs expert parallelism: set {1.key}',
    ),
    Combination(
        {
            "split.train.tp": above(1),
            f"{KEY}.sequence_parallel": OFF,
            "model.num_experts": above(0),
        },
        "{0} with experts needs {1.key} = true",
    ),
    Combination(
        {
            f"{KEY}.layers": equal("transformer_engine"),
            "split.infer.tp": above(1),
            "engine.kind": equal("native"),
        },
        "{1}: " + OTHER_SUMS,
    ),
    Combination(
        {f"{KEY}.layers": equal("transformer_engine"), "run.row_shards": above(1)},
        "{1}: " + OTHER_SUMS,
    ),
    Combination(
        {f"{KEY}.kind": equal("megatron"), "model.whole_layers": ON, "model": ON},
        "{2} has {1.value}, which {0.value!r} does not train: set {0.key} = 'fsdp2'",
    ),
    Combination(
        {
            f"{KEY}.kind": equal("megatron"),
            "model.num_experts": above(0),
            "engine.kind": ON,
            "model": ON,
        },
        "{3.value} is a mixture of experts, which {0.value!r} trains only in recipes without an "
        "engine, such as sft: set {0.key} = 'fsdp2'",
    ),
)


def check_layout(spec: ModelSpec, axes: Mapping[str, int], cfg: MegatronConfig, role: str) -> None:
    """Raise a ConfigError, one sentence, if a model cannot be cut along these axes."""
    at = f"split.{role}"
    require_known(spec.distinct_blocks())
    settings = {
        "trainer": {"backend": cfg},
        "split": {"train": {axis: size_of(axes, axis) for axis in MODEL}},
        "model": spec,
    }
    refuse(REFUSED, settings, role)
    _check_tensors(spec, axes.get("tp", 1), cfg, at)
    _check_sequences(spec, axes, cfg, at)
    _check_stages(spec, axes.get("pp", 1), cfg, at)
    _check_experts(spec, axes, at)


def _check_tensors(spec: ModelSpec, tp: int, cfg: MegatronConfig, at: str) -> None:
    for one in spec.distinct_tensors():
        if one.tp_cut is not None:
            one.tp_cut.check(tp, f"{at}.tp = {tp}")
    if spec.vocab_size < tp * tp:
        raise ConfigError(
            f"{at}.tp = {tp} leaves ranks without a token of the vocabulary of {spec.vocab_size}"
        )


def _check_sequences(
    spec: ModelSpec, axes: Mapping[str, int], cfg: MegatronConfig, at: str
) -> None:
    cp, tp = axes.get("cp", 1), axes.get("tp", 1)
    for block in spec.distinct_blocks() if cfg.layers == "local" else ():
        cache = block.cache(tp)
        if cache is not None and cache.arrays[0][0] % cp:
            on_rank = f" that {at}.tp = {tp} leaves on a rank" if tp > 1 else ""
            raise ConfigError(
                f"{at}.cp = {cp} does not divide the {cache.arrays[0][0]} key-value heads{on_rank},"
                f' which local layers share: set {KEY}.layers = "transformer_engine", whose '
                "attention is a ring"
            )


def _check_stages(spec: ModelSpec, pp: int, cfg: MegatronConfig, at: str) -> None:
    if pp > spec.num_layers:
        raise ConfigError(f"{at}.pp = {pp} is more than the model's {spec.num_layers} layers")
    if spec.num_layers % (pp * cfg.chunks):
        stages = f"{at}.pp = {pp}" + (f" x {KEY}.chunks = {cfg.chunks}" if cfg.chunks > 1 else "")
        raise ConfigError(f"{stages} does not divide the model's {spec.num_layers} layers")


def _check_experts(spec: ModelSpec, axes: Mapping[str, int], at: str) -> None:
    ep, etp = axes.get("ep", 1), axes.get("etp", 1)
    if not spec.num_experts:
        for axis, size in (("ep", ep), ("etp", etp)):
            if size > 1:
                raise ConfigError(f"{at}.{axis} = {size}: the model has no experts")
        return
    for one in spec.distinct_tensors():
        if one.expert is not None and one.cut is not None:
            one.cut.check(etp, f"{at}.etp = {etp}")
    if spec.num_experts % ep:
        raise ConfigError(f"{at}.ep = {ep} does not divide the model's {spec.num_experts} experts")
