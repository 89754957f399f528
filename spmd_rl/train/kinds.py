"""Kinds of backends: what one does that its config cannot say itself, looked up by that config.

No torch: a backend is imported where it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd_rl.config.combinations import Combination
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.split import Placement
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import Head, ModelSpec
from spmd_rl.offload.ledger import TagBytes
from spmd_rl.train.config import Fsdp2Config, TrainerConfig, megatron_settings
from spmd_rl.train.cost.memory import dtype_on_gpu, fsdp2_memory
from spmd_rl.train.fsdp2.axes import check_axes
from spmd_rl.train.megatron.config import REFUSED, MegatronConfig, check_layout
from spmd_rl.train.megatron.memory import megatron_memory
from spmd_rl.train.refusals import AXES_REFUSED

if TYPE_CHECKING:
    from spmd_rl.mesh.role_context import RoleContext
    from spmd_rl.offload.role_memory import RoleMemory
    from spmd_rl.train.learner import Learner


@dataclass(frozen=True)
class BackendKind:
    """A kind of backend, as functions of a trainer's config.

    `refused` has what does not go together with this backend. `check_axes` raises a ConfigError or
    PlanError for axes that the backend or the model in a folder ("": not known) does not have.
    `memory` returns what a rank takes, and `build` is called by all ranks of the role.
    """

    config: type
    refused: tuple[Combination, ...]
    check_axes: Callable[[TrainerConfig, Placement, str], None]
    memory: Callable[[ModelSpec, TrainerConfig, Placement, Head], Sequence[TagBytes]]
    build: Callable[[TrainerConfig, str, RoleContext, Head, RoleMemory], Learner]


def _check_fsdp2_axes(cfg: TrainerConfig, placement: Placement, model: str) -> None:
    check_axes(cfg, placement, read_spec(model) if model else None)


def _build_fsdp2(
    cfg: TrainerConfig, folder: str, context: RoleContext, head: Head, memory: RoleMemory
) -> Learner:
    from spmd_rl.train.build import build_fsdp2

    return build_fsdp2(cfg, folder, context, head, memory)


def _check_megatron_axes(cfg: TrainerConfig, placement: Placement, model: str) -> None:
    if model:
        check_layout(read_spec(model), placement.axes, megatron_settings(cfg), placement.name)


def _megatron_memory(
    spec: ModelSpec, cfg: TrainerConfig, placement: Placement, head: Head
) -> Sequence[TagBytes]:
    return megatron_memory(
        spec,
        megatron_settings(cfg),
        placement,
        dtype=dtype_on_gpu(cfg),
        max_tokens=cfg.max_tokens,
        logit_rows=cfg.logit_rows,
    )


def _build_megatron(
    cfg: TrainerConfig, folder: str, context: RoleContext, head: Head, memory: RoleMemory
) -> Learner:
    from spmd_rl.train.megatron.build import build_megatron

    return build_megatron(cfg, folder, context, memory)


FSDP2 = BackendKind(Fsdp2Config, AXES_REFUSED, _check_fsdp2_axes, fsdp2_memory, _build_fsdp2)
MEGATRON = BackendKind(
    MegatronConfig, REFUSED, _check_megatron_axes, _megatron_memory, _build_megatron
)
KINDS = (FSDP2, MEGATRON)


def kind_of(cfg: TrainerConfig, head: Head = "lm") -> BackendKind:
    """Return the kind of a trainer's backend.

    FSDP2 alone has value heads. Its functions raise a ConfigError where the config has another.
    Raises: ConfigError for a backend of no kind.
    """
    if head == "value":
        return FSDP2
    for kind in KINDS:
        if isinstance(cfg.backend, kind.config):
            return kind
    raise ConfigError(f"trainer.backend is a {type(cfg.backend).__name__}, which is no backend")
