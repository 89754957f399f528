"""ExtraRole: a role that a recipe spawns besides its trainer and its engine. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from spmd_rl.config.combinations import ON, Combination, above, refuse
from spmd_rl.controller.endpoint import Role
from spmd_rl.errors import PlanError
from spmd_rl.mesh.split import Placement, Placements
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.fsdp2.axes import check_axes, check_frozen_axes
from spmd_rl.train.refusals import FOREIGN_REFUSED
from spmd_rl.train.value_trainer import ValueTrainer

REFERENCE = "reference"  # name of the role, and of its ranks in a split
# with a model of FSDP2 beside the trainer, whose role is `role`
ROLES_REFUSED = tuple(
    Combination(
        {f"split.train.{axis}": above(1), "role": ON},
        "{0}: the role '{1.value}' shares these ranks and has no such axis, so set "
        "split.{1.value}.ranks to ranks of its own",
        PlanError,
    )
    for axis in ("pp", "etp")
)


class SettingsKind(NamedTuple):
    """What is spawned for settings of a type, and what checks the axes of its ranks."""

    settings: type
    role: type[Role]
    check_axes: Callable[[Any, Placement, ModelSpec | None], None]


KINDS = (
    SettingsKind(FrozenConfig, FrozenModel, check_frozen_axes),
    SettingsKind(TrainerConfig, ValueTrainer, check_axes),
)


@dataclass(frozen=True)
class ExtraRole:
    """A frozen model, a trainer of a value head, or a role of your own.

    A recipe's config lists them in a method `extra_roles()`, so that `spmd-rl plan` counts them.
    `model` is a Hugging Face folder. `is_refreshed` says that a link pushes the trainer's weights
    to the role. `role` is its class; None is `FrozenModel` or `ValueTrainer`, as the type of `cfg`
    says.
    """

    name: str
    cfg: object
    model: str = ""
    is_refreshed: bool = False
    role: type[Role] | None = None

    @property
    def role_class(self) -> type[Role]:
        """The class that is spawned. Raises: PlanError where neither `role` nor `cfg` says it."""
        if self.role is not None:
            return self.role
        if self._kind is not None:
            return self._kind.role
        raise PlanError(
            f"the role '{self.name}' has settings of type {type(self.cfg).__name__}: say its class "
            "in ExtraRole(role=...)"
        )

    @property
    def _kind(self) -> SettingsKind | None:
        return next((kind for kind in KINDS if isinstance(self.cfg, kind.settings)), None)

    def check_axes(self, placements: Placements) -> None:
        """Raise a ConfigError or PlanError for axes of its ranks that its model does not have."""
        if self._kind is None:
            return
        placement = self.placement(placements)
        if placement.name != self.name:
            settings = {"split": {"train": placement.axes}, "role": self.name}
            refuse(ROLES_REFUSED, settings, placement.name)
        spec = read_spec(self.model) if self.model else None
        head = getattr(self._kind.role, "HEAD", "lm")
        refuse(FOREIGN_REFUSED, {"model.impl": spec.impl if spec else "", "model.head": head})
        self._kind.check_axes(self.cfg, placement, spec)

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


def reference_roles(
    trainer: TrainerConfig,
    model: str,
    reference: str = "",
    *,
    is_refreshed: bool = False,
    has_own_ranks: bool = False,
) -> list[ExtraRole]:
    """Return the frozen model that a recipe compares a policy with, whose first weights are those
    of the folder `model`.

    It has the weights of the folder `reference`, or the first ones of the policy. There is none
    where adapters learn beside these weights, unless it has ranks of its own: then the trainer's
    `score_base` takes its place.
    """
    is_base = not reference or (reference == model and trainer.init == "folder")
    if trainer.lora.rank and is_base and not has_own_ranks:
        return []
    frozen = FrozenConfig.like(trainer)
    if reference:
        frozen = replace(frozen, init="folder")
    return [ExtraRole(REFERENCE, frozen, reference or model, is_refreshed)]
