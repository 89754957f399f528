"""LoRA: which linear layers have a low-rank adapter beside them, and of which shape. No torch.

A layer with an adapter computes base(x) + B(scale * A(x)). Names of parameters are those of PEFT:
"model.layers.0.<layer>.lora_A.weight".
Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spmd_rl.config.combinations import OFF, ON, Combination, refuse
from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError
from spmd_rl.model.layers.delta import ALL_PROJECTIONS as DELTA_PROJECTIONS
from spmd_rl.model.layers.gqa import PROJECTIONS as ATTENTION_PROJECTIONS
from spmd_rl.model.layers.layer import TensorSpec
from spmd_rl.model.layers.mla import PROJECTIONS as LATENT_PROJECTIONS
from spmd_rl.model.layers.mlp import PROJECTIONS as MLP_PROJECTIONS
from spmd_rl.model.spec import ModelSpec

ALL_LINEAR = "all-linear"
TARGETS = (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS, *DELTA_PROJECTIONS, *LATENT_PROJECTIONS)
REFUSED = (
    Combination(
        {"folder": ON, "rank": OFF},
        "{0}: expected '' without a rank: set rank to `r` of its adapter_config.json",
    ),
    Combination(
        {"merged_push": ON, "rank": OFF},
        "{0}: expected false without a rank: there is nothing to merge",
    ),
)
A, B = "lora_A", "lora_B"  # the modules of an adapter, whose weights are [rank, in], [out, rank]


@dataclass(frozen=True)
class LoraConfig:
    """Adapters that are trained alone. Without a rank there are none, and all weights are trained.

    Field names and their meaning are those of PEFT, without its prefixes.
    """

    rank: int = 0  # inner width of each adapter; 0: no adapters
    alpha: float = 32.0  # what an adapter computes is scaled by alpha / rank
    # names of the projections that have an adapter, or "all-linear" for all that
    # the model has
    targets: tuple[str, ...] = (ALL_LINEAR,)
    # PEFT folder that holds the first adapters, of the same rank, alpha and targets; "": A is
    # random and B zero
    folder: str = ""
    # whether a push brings whole weights with the adapters merged into them, for an engine that
    # has no adapters; it needs run.exact = false
    merged_push: bool = False

    def __post_init__(self) -> None:
        require(self.rank >= 0, "rank", self.rank, "0 (no adapters) or more")
        is_scale = math.isfinite(self.alpha) and self.alpha > 0
        require(is_scale, "alpha", self.alpha, "more than 0, and finite")
        expected = f'"{ALL_LINEAR}", or one or more of {", ".join(TARGETS)}'
        are_known = bool(self.targets) and {ALL_LINEAR, *TARGETS}.issuperset(self.targets)
        require(are_known, "targets", self.targets, expected)
        refuse(REFUSED, self)

    @property
    def projections(self) -> tuple[str, ...]:
        """The names of the projections that have an adapter in models that have them."""
        if not self.rank:
            return ()
        return tuple(name for name in TARGETS if {name, ALL_LINEAR}.intersection(self.targets))

    def of_model(self, spec: ModelSpec) -> LoraConfig:
        """Return the same adapters, with the names of the projections that this model has.

        Raises: ConfigError if it has none of them.
        """
        layers = {base.name.removesuffix(".weight") for base in spec.parameters()}
        last = {name.rpartition(".")[2] for name in layers}
        if spec.has_expert_biases:  # PEFT has no adapters for these
            last -= set(MLP_PROJECTIONS)
        targets = tuple(name for name in self.projections if name in last)
        if self.rank and not targets:
            names = ", ".join(self.targets)
            raise ConfigError(f"trainer.lora.targets: the model has no projection named {names}")
        return replace(self, targets=targets) if self.rank else self

    @property
    def scale(self) -> float:
        """The factor of what A computes."""
        return self.alpha / self.rank

    @property
    def of_engine(self) -> LoraConfig:
        """The adapters that an engine has: none where a push merges them into its weights."""
        return NO_LORA if self.merged_push else self

    @property
    def arithmetic(self) -> str:
        """All that a forward pass depends on beside the adapters' weights, as text."""
        return f"rank={self.rank}, alpha={self.alpha}, targets={'+'.join(self.projections)}"

    @staticmethod
    def parse(arithmetic: str) -> LoraConfig:
        """Return the config whose `arithmetic` this is; that without adapters for an empty text."""
        if not arithmetic:
            return NO_LORA
        rank, alpha, targets = (part.partition("=")[2] for part in arithmetic.split(", "))
        return LoraConfig(int(rank), float(alpha), tuple(targets.split("+")))

    def tensors(self, spec: ModelSpec) -> Iterator[TensorSpec]:
        """Yield every adapter's parameters, in the network's order. Those of an expert are its.

        Raises: as `of_model`.
        """
        projections = self.of_model(spec).projections
        for base in spec.parameters():
            layer, _, kind = base.name.rpartition(".")
            if kind == "weight" and layer.rpartition(".")[2] in projections:
                rows, columns = base.shape
                a, b = (f"{layer}.{name}.weight" for name in (A, B))
                yield TensorSpec(a, (self.rank, columns), expert=base.expert)
                yield TensorSpec(b, (rows, self.rank), expert=base.expert)

    def shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of every adapter's parameters by name, in the network's order."""
        return {tensor.name: tensor.shape for tensor in self.tensors(spec)}

    def trained_shapes(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Return the shape of what a language model's trainer trains, by name."""
        return self.shapes(spec) if self.rank else spec.trainable_shapes()


NO_LORA = LoraConfig()


@dataclass(frozen=True)
class AdaptedBase:
    """What an engine is told of a trainer's adapters: their shape, and the base beside them.

    The base has random weights of seed `random_seed`; None: it has those of the model folder.
    """

    lora: LoraConfig
    random_seed: int | None = None


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter."""
    return name.endswith((f".{A}.weight", f".{B}.weight"))
