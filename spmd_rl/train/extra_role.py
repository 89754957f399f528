"""ExtraRole: a role that a recipe spawns besides its trainer and its engine. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.train.config import FrozenConfig, TrainerConfig


@dataclass(frozen=True)
class ExtraRole:
    """A frozen model or a trainer of a value head, as the type of `cfg` says.

    A recipe's config lists them in a method `extra_roles()`, so that `spmd-rl plan` counts them.
    `model` is a Hugging Face folder. `is_refreshed` says that a link pushes the trainer's weights
    to the role.
    """

    name: str
    cfg: FrozenConfig | TrainerConfig
    model: str
    is_refreshed: bool = False

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
