"""Check that ranks can share the experts of a model evenly. No torch."""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.model.spec import ModelSpec


def check_shares(spec: ModelSpec, num_ranks: int, setting: str) -> None:
    """Raise a ConfigError that begins with `setting` unless `num_ranks` can have equally many
    experts of each mixture.
    """
    if not spec.num_experts:
        raise ConfigError(f"{setting}: the model has no experts to share; set it to 1")
    if spec.has_expert_biases:
        raise ConfigError(f"{setting}: ranks do not share experts with biases; set it to 1")
    for layer in spec.distinct_blocks():
        numbers = {one.expert for one in layer.parameters() if one.expert is not None}
        if len(numbers) % num_ranks:
            raise ConfigError(f"{setting} does not divide the {len(numbers)} experts of a layer")
