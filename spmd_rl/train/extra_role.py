"""ExtraRole: a role that a recipe spawns besides its trainer and its engine. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.value_trainer import ValueTrainer


@dataclass(frozen=True)
class ExtraRole:
    """A frozen model, a trainer of a value head, or a role of your own.

    A recipe's config lists them in a method `extra_roles()`, so that `spmd-rl plan` counts them.
    `model` is a Hugging Face folder. `is_refreshed` says that a link pushes the trainer's weights
    to the role. `role` is its class; None is `FrozenModel` or `ValueTrainer`, as the type of `cfg`
    says.
    """

    name: str
    cfg: Any
    model: str = ""
    is_refreshed: bool = False
    role: type[Role] | None = None

    @property
    def role_class(self) -> type[Role]:
        """The class that is spawned. Raises: PlanError where neither `role` nor `cfg` says it."""
        if self.role is not None:
            return self.role
        if isinstance(self.cfg, FrozenConfig):
            return FrozenModel
        if isinstance(self.cfg, TrainerConfig):
            return ValueTrainer
        raise PlanError(
            f"the role '{self.name}' has settings of type {type(self.cfg).__name__}: say its class "
            "in ExtraRole(role=...)"
        )

    def placement(self, placements: Placements) -> Placement:
        """Return the ranks that the split gives to the role's name, else those of the trainer.

        Raises: PlanError when the split has neither.
        """
        found = placements.get(self.name) or placements.get("train")
        if found is None:
            raise PlanError(
                f"the role '{self.name}' has no ranks: add split.{self.name}, or split.train"
            )
        return found
