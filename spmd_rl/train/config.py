"""Settings of a trainer and of a frozen model, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from spmd_rl.config.combinations import refuse
from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import (
    CACHE_REFUSED,
    FORMATS,
    CacheFormat,
    Exponents,
    check_exponents,
)
from spmd_rl.model.layers.layer import Recompute
from spmd_rl.model.lora import AdaptedBase, LoraConfig
from spmd_rl.train.megatron.config import MegatronConfig
from spmd_rl.train.refusals import REFUSED, REFUSED_IN_FSDP2

# Largest weights, as they are stored, that `wrap = "auto"` gathers as one unit. Layer by layer, a
# step of 0.6B on two H100s takes 1.57 times as long.
WHOLE_MODEL_BYTES = 4 << 30
Wrap = Literal["auto", "layer", "model"]
OptimizerKind = Literal["adamw", "muon", "adamw8bit"]
EpDispatcherKind = Literal["torch", "deep_ep"]


@dataclass(frozen=True)
class Fsdp2Config:
    """Settings of the FSDP2 backend alone."""

    sums_in_parts: ClassVar[bool] = True  # as engines whose model ranks share
    # on one shard, each tensor is one piece, which an engine can share
    holds_whole_tensors: ClassVar[bool] = True
    # the axes along which a rank sends rows to each other one, point to point
    sends_along: ClassVar[tuple[str, ...]] = ("cp", "tp")

    kind: Literal["fsdp2"] = "fsdp2"  # which backend computes gradients
    # what each layer computes again in the backward pass; cheap: all but its GEMMs
    recompute: Literal["none", "cheap", "all"] = "none"
    # the unit whose weights are gathered at once; auto: the model while it is small, else a layer
    wrap: Wrap = "auto"
    # what lies in host memory: AdamW's moments, which each optimizer step streams through the GPU;
    # master: also the fp32 weights, during forward and backward (docs/large-models.md)
    offload: Literal["none", "moments", "master"] = "none"
    # whether what layers keep for the backward pass waits in host memory
    offload_activations: bool = False
    # what brings rows to the ranks that share experts (split.train.ep); deep_ep: DeepEP, on the
    # GPUs of one host (docs/experts.md)
    ep_dispatcher: EpDispatcherKind = "torch"

    def __post_init__(self) -> None:
        refuse(REFUSED_IN_FSDP2, self)

    @property
    def recompute_choices(self) -> Mapping[Recompute, Fsdp2Config]:
        """The config with each choice of recomputation, as far as its other settings allow it."""
        choices: tuple[Recompute, ...] = ("none", "cheap", "all")
        return {
            choice: replace(self, recompute=choice)
            for choice in choices
            if choice != "cheap" or not self.offload_activations
        }

    def describe(self) -> str:
        """Return a sentence for the start of a run: none, for the backend that most runs have."""
        return ""

    def gathers_whole(self, num_bytes: int) -> bool:
        """Return whether a model with `num_bytes` of master weights is gathered as one unit."""
        return _gathers_whole(self.wrap, num_bytes)


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer besides `lr`, `betas`, `eps` and `weight_decay` of the trainer."""

    # muon: Muon for the layers' matrices and AdamW for the rest; adamw8bit: moments in 8 bits
    kind: OptimizerKind = "adamw"
    momentum: float = 0.95  # Muon's
    # how Muon scales its rate by a matrix's shape; match_rms_adamw: to updates as large as AdamW's
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "a number in [0, 1)")


@dataclass(frozen=True)
class ParameterGroup:
    """Settings of the parameters whose names match a pattern."""

    pattern: str  # of Hugging Face names, with * and ?
    lr_scale: float = 1.0  # times the schedule's rate
    weight_decay: float | None = None  # None: as without the group

    def __post_init__(self) -> None:
        for name in ("lr_scale", "weight_decay"):
            value = getattr(self, name)
            is_fine = value is None or (math.isfinite(value) and value >= 0)
            require(is_fine, name, value, "0 or more, and finite")


@dataclass(frozen=True)
class TrainerConfig:
    """Settings of a trainer with any backend."""

    init: Literal["folder", "random"] = "folder"  # where the first weights come from
    seed: int = 0  # of random weights
    lr: float = 1e-6  # learning rate after warm-up
    # how the learning rate falls to zero at total_steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # optimizer steps in which the rate rises linearly to lr; the last of them has lr
    warmup_steps: int = 0
    # optimizer steps after which linear and cosine are at zero: steps times minibatches of the run
    total_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    eps: float = 1e-8  # AdamW's
    weight_decay: float = 0.0  # on matrices only, not on norms and biases
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    # patterns of Hugging Face names: parameters that stay as they are, such as "model.layers.0.*"
    freeze: tuple[str, ...] = ()
    # rates and decay of some parameters, such as {pattern = "lm_head.*", lr_scale = 0.1}; the
    # first group whose pattern matches a parameter holds
    groups: tuple[ParameterGroup, ...] = ()
    # adapters that are trained alone, beside weights that stay as they are (docs/lora.md)
    lora: LoraConfig = field(default_factory=LoraConfig)
    # of the loss that balances the loads of experts, beside the recipe's (docs/experts.md)
    router_aux_loss_coef: float = 0.0
    clip_norm: float = 1.0  # largest gradient norm; 0 leaves gradients as they are
    minibatches: int = 1  # optimizer steps of a train step; each has a share of its batch
    # tokens of a micro-batch on one rank; a longer sequence raises it to its own length
    max_tokens: int = 16384
    logit_rows: int = 2048  # rows of logits that exist at once
    # dtype of the forward pass; auto: bfloat16 on GPUs; master weights are float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # the weights of layers that the forward pass computes with, as in the engine: as they are, or
    # rounded to 8 or 4 bits (docs/low-precision.md)
    weights: WeightFormat = "full"
    # keys and values that attention takes, as in the engine: as they are, or rounded to 8 bits
    cache: CacheFormat = "full"
    cache_exponents: Exponents = (0, 0)  # of two: scales of the codes of keys, and of values
    # tokens whose keys are attended to at once, as in the engine; 0: all (docs/numerics.md)
    attention_split: int = 0
    # whether checkpoints hold the optimizer's state; without AdamW's they take a third of the room
    save_optimizer: bool = True
    # the same weights and batch give the same bits; on GPUs, at some cost in speed
    deterministic: bool = False
    # parts of a batch whose gradients are summed in a fixed order, beside `deterministic`: numbers
    # of ranks that divide it give the same bits (docs/resume.md); 0: a part for each rank
    data_parts: int = 0
    backend: Fsdp2Config | MegatronConfig = field(default_factory=Fsdp2Config)

    def __post_init__(self) -> None:
        for name in ("minibatches", "max_tokens", "logit_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in (
            "lr",
            "warmup_steps",
            "eps",
            "weight_decay",
            "clip_norm",
            "router_aux_loss_coef",
        ):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "0 or more, and finite")
        _require_seed(self.seed)
        are_betas = all(0 <= beta < 1 for beta in self.betas)
        require(are_betas, "betas", self.betas, "two numbers in [0, 1)")
        _require_split(self.attention_split)
        require(self.data_parts >= 0, "data_parts", self.data_parts, "0 (off) or more")
        check_exponents(self.cache_exponents)
        refuse(REFUSED, self)

    @property
    def adapted_base(self) -> AdaptedBase | None:
        """What an engine is told of its adapters; None where it has none."""
        lora = self.lora.of_engine
        if not lora.rank:
            return None
        return AdaptedBase(lora, self.seed if self.init == "random" else None)


def fsdp2_settings(cfg: TrainerConfig) -> Fsdp2Config:
    """Return the settings of the FSDP2 backend. Raises: ConfigError if the config has another."""
    if cfg.backend.kind != "fsdp2":
        raise ConfigError(
            f"trainer.backend.kind = '{cfg.backend.kind}' trains no value head: "
            "set it to 'fsdp2' for this role"
        )
    return cfg.backend


def megatron_settings(cfg: TrainerConfig) -> MegatronConfig:
    """Return the settings of the Megatron-core backend, of a trainer that has it."""
    assert cfg.backend.kind == "megatron"
    return cfg.backend


@dataclass(frozen=True)
class FrozenConfig:
    """Settings of a frozen model: a reference, a teacher or a reward model."""

    init: Literal["folder", "random"] = "folder"  # where the weights come from
    seed: int = 0  # of random weights
    # tokens of a micro-batch on one rank; a longer sequence raises it to its own length
    max_tokens: int = 16384
    logit_rows: int = 2048  # rows of logits that exist at once
    # dtype of weights and forward pass; auto: bfloat16 on GPUs
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    weights: WeightFormat = "full"  # of layers, as in the engine (docs/low-precision.md)
    cache: CacheFormat = "full"  # of keys and values, as in the engine
    cache_exponents: Exponents = (0, 0)  # of two: scales of the codes of keys, and of values
    # tokens whose keys are attended to at once, as in the engine; 0: all (docs/numerics.md)
    attention_split: int = 0
    # the unit whose weights are gathered at once; auto: the model while it is small, else a layer
    wrap: Wrap = "auto"

    @staticmethod
    def like(trainer: TrainerConfig) -> FrozenConfig:
        """Return the settings of a model whose log-probs have the bits of this trainer's.

        With random weights they are the trainer's first ones.
        """
        names = ("init", "seed", "max_tokens", "logit_rows", "dtype", "attention_split", *FORMATS)
        same: dict[str, Any] = {name: getattr(trainer, name) for name in names}
        return FrozenConfig(**same, wrap=trainer.backend.wrap)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "logit_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require_seed(self.seed)
        _require_split(self.attention_split)
        check_exponents(self.cache_exponents)
        refuse(CACHE_REFUSED, self)

    def gathers_whole(self, num_bytes: int) -> bool:
        """Return whether a model with `num_bytes` of weights is gathered as one unit."""
        return _gathers_whole(self.wrap, num_bytes)


def is_sharded(cfg: object) -> bool:
    """Return whether these are settings of a model that is sharded over its role's ranks."""
    return isinstance(cfg, TrainerConfig | FrozenConfig)


def _gathers_whole(wrap: Wrap, num_bytes: int) -> bool:
    return wrap == "model" or (wrap == "auto" and num_bytes <= WHOLE_MODEL_BYTES)


def _require_seed(seed: int) -> None:
    require(0 <= seed < 1 << 63, "seed", seed, "in [0, 2^63)")


def _require_split(split: int) -> None:
    fits = split >= 0 and split % 128 == 0
    require(fits, "attention_split", split, "0 (all), or a multiple of 128")


def learning_rate(cfg: TrainerConfig, step: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    done = min((step - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps), 1.0)
    return cfg.lr * (1 - done if cfg.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
