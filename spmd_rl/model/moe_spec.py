"""Specification of a Qwen3 mixture of experts, which Megatron-core alone trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spmd_rl.errors import ConfigError
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.spec import MOE_FAMILY, ModelSpec, model_folder, spec_of

COUNTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class MoeSpec(ModelSpec):
    """A decoder whose MLPs are `num_experts` gated ones, of which each token takes some."""

    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # rows of an expert's gate projection
    normalizes_weights: bool = True  # whether the weights of a token's experts add up to one

    def expert_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of an expert's parameters, by the name within the expert."""
        hidden, inner = self.hidden_size, self.expert_size
        return {
            "gate_proj.weight": (inner, hidden),
            "up_proj.weight": (inner, hidden),
            "down_proj.weight": (hidden, inner),
        }

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's parameters, by the name within the layer."""
        dense = super().layer_shapes()
        shapes = {name: shape for name, shape in dense.items() if not name.startswith("mlp.")}
        shapes["mlp.gate.weight"] = (self.num_experts, self.hidden_size)
        for expert in range(self.num_experts):
            shapes |= {
                f"mlp.experts.{expert}.{name}": shape
                for name, shape in self.expert_shapes().items()
            }
        return shapes


def read_spec(folder: str | Path) -> ModelSpec:
    """Read the specification of a dense model or of a mixture of experts.

    Raises: as `ModelSpec.from_folder`.
    """
    path = model_folder(folder) / "config.json"
    if not path.is_file() or read_object(path).get("model_type") != MOE_FAMILY:
        return ModelSpec.from_folder(folder)
    config = Fields(str(path), read_object(path))
    if config.raw.get("decoder_sparse_step", 1) != 1 or config.raw.get("mlp_only_layers"):
        raise ConfigError(f"{path}: layers without experts beside others with them are not read")
    # transformers 5 writes a new name for the number of experts
    count = next((key for key in COUNTS if key in config.raw), COUNTS[0])
    dense = spec_of(folder, config, "qwen3")
    return MoeSpec(
        **(vars(dense) | {"family": MOE_FAMILY}),
        num_experts=config.count(count),
        experts_per_token=config.count("num_experts_per_tok"),
        expert_size=config.count("moe_intermediate_size"),
        normalizes_weights=config.flag("norm_topk_prob", False),
    )
