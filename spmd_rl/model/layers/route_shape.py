"""Shape of a model's routes: how many mixtures it has, and how many experts a token takes in each.

Routes are recorded with tokens (types/routes.py) and replayed by a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spmd_rl.errors import ConfigError, ContractError
from spmd_rl.model.layers.moe import Moe
from spmd_rl.model.spec import ModelSpec
from spmd_rl.types.routes import EXPERT_IDS, RouteIds, dtype_of_ids


@dataclass(frozen=True)
class RouteShape:
    """`num_layers` mixtures of `num_experts` each, of which a token takes `num_chosen`."""

    num_layers: int
    num_chosen: int
    num_experts: int

    @staticmethod
    def of(spec: ModelSpec) -> RouteShape | None:
        """Return the shape of a model's routes; None if they cannot be recorded.

        That is so without mixtures, with mixtures that differ, and with one expert a token.
        """
        layers = [block.mlp for block in spec.blocks if isinstance(block.mlp, Moe)]
        sizes = {(one.experts_per_token, one.num_experts) for one in layers}
        if len(sizes) != 1:
            return None
        ((chosen, num_experts),) = sizes
        return RouteShape(len(layers), chosen, num_experts) if chosen > 1 else None

    @staticmethod
    def required(spec: ModelSpec) -> RouteShape:
        """Return the shape of a model's routes. Raises: ConfigError if they cannot be recorded."""
        if (shape := RouteShape.of(spec)) is None:
            raise ConfigError(
                f"sampling.replay_routes needs mixtures that are alike, of which each token takes "
                f"two experts or more, and this {spec.family} model has none: set it to false"
            )
        return shape

    @property
    def width(self) -> int:
        """The number of ids of a token."""
        return self.num_layers * self.num_chosen

    @property
    def dtype(self) -> np.dtype[np.uint8] | np.dtype[np.uint16]:
        return dtype_of_ids(self.num_experts)

    def check(self, routes: RouteIds) -> None:
        """Raise a ContractError for routes that are not of this model. Shape: [T, W]."""
        if routes.dtype != self.dtype or routes.shape[1:] != (self.width,):
            raise ContractError(
                f"the column {EXPERT_IDS!r} is {routes.dtype} with {list(routes.shape[1:])} values "
                f"a token: expected {self.dtype} with {self.width}, which are "
                f"{self.num_chosen} experts in each of {self.num_layers} layers"
            )
        by_layer = routes.reshape(len(routes), self.num_layers, self.num_chosen)
        lower, upper = by_layer[..., :-1], by_layer[..., 1:]
        is_bad = ((lower >= upper).any(2) & by_layer.any(2)) | (
            by_layer[..., -1] >= self.num_experts
        )
        if is_bad.any():
            token, layer = np.argwhere(is_bad)[0].tolist()
            raise ContractError(
                f"the column {EXPERT_IDS!r} has {by_layer[token, layer].tolist()} for token "
                f"{token} in the mixture {layer}: expected ascending ids of different experts "
                f"below {self.num_experts}"
            )
