"""What a trainer can be told, and the learning rate at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.rules import require

WHOLE_MODEL_BYTES = 64 << 20  # up to this size FSDP gathers the model as one
# the same on one rank: layer by layer, the host would be slower than the GPU
WHOLE_ALONE_BYTES = 4 << 30


@dataclass(frozen=True)
class TrainerConfig:
    """One model and how to train it. `minibatches` is the number of optimizer steps a train step
    takes.
    """

    init: Literal["folder", "random"] = "folder"  # where the first weights come from
    seed: int = 0  # of random weights
    lr: float = 1e-6  # learning rate after warm-up
    # its course to zero at total_steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0  # optimizer steps in which the rate rises linearly to lr
    total_steps: int = 0  # optimizer steps of the whole schedule; needed by linear and cosine
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW's
    eps: float = 1e-8  # AdamW's
    weight_decay: float = 0.0  # on matrices only, not on norms and biases
    clip_norm: float = 1.0  # largest gradient norm; 0 leaves gradients as they are
    minibatches: int = 1  # optimizer steps a train step takes, each on a share of the batch
    # tokens of a micro-batch on one rank; a longer sequence raises it to its own length
    max_tokens: int = 16384
    logit_rows: int = 2048  # rows of logits that exist at once
    # to compute in; auto: bfloat16 on GPUs; masters are float32
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # tokens whose keys are seen at once, as in the engine; 0: all (docs/numerics.md)
    attention_split: int = 0
    # in the backward pass, of each layer; cheap: but products
    recompute: Literal["none", "cheap", "all"] = "none"
    # what FSDP gathers at once; auto: the model while it is small
    wrap: Literal["auto", "layer", "model"] = "auto"
    # checkpoints hold AdamW's moments too; without them they take a third of the room
    save_optimizer: bool = True
    # the same weights and batch give the same bits; on GPUs, at some cost in speed
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("minibatches", "max_tokens", "logit_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("lr", "warmup_steps", "eps", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, name, value, "0 or more, and finite")
        require(0 <= self.seed < 1 << 63, "seed", self.seed, "in [0, 2^63)")
        require(
            all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers in [0, 1)"
        )
        fits = self.attention_split >= 0 and self.attention_split % 128 == 0
        require(fits, "attention_split", self.attention_split, "0 (all), or a multiple of 128")
        if self.schedule != "constant":
            require(
                self.total_steps > self.warmup_steps,
                "total_steps",
                self.total_steps,
                f"more than warmup_steps = {self.warmup_steps} for the schedule '{self.schedule}'",
            )


def gathers_whole(cfg: TrainerConfig, num_bytes: int, num_ranks: int) -> bool:
    """Whether FSDP gathers a model of so many bytes of master weights as one, or layer by layer."""
    small = num_bytes <= (WHOLE_ALONE_BYTES if num_ranks == 1 else WHOLE_MODEL_BYTES)
    return cfg.wrap == "model" or (cfg.wrap == "auto" and small)


def learning_rate(cfg: TrainerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return cfg.lr
    done = min((step - cfg.warmup_steps) / (cfg.total_steps - cfg.warmup_steps), 1.0)
    return cfg.lr * (1 - done if cfg.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)
