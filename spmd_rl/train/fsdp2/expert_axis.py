"""The axis ep of FSDP2: what goes with it, before a run. No torch.

Its ranks share the experts of each mixture, and each has a block of them, one after the other. The
ranks that have the same block are those along `edp`. They shard it.
"""

from __future__ import annotations

from spmd_rl.errors import ConfigError
from spmd_rl.mesh.axes import size_of
from spmd_rl.mesh.split import Placement
from spmd_rl.model.layers.expert_shares import check_shares
from spmd_rl.model.spec import ModelSpec
from spmd_rl.train.config import TrainerConfig, Wrap, fsdp2_settings

DEEP_EP_SIZES = (2, 4, 8)  # ranks of a host between which DeepEP has kernels


def check_expert_axis(cfg: TrainerConfig, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where ranks cannot share experts with these settings.

    `spec` is None where the model is not known.
    """
    settings = fsdp2_settings(cfg)
    check_shared_experts(settings.wrap, placement, spec)
    at = placement.sharding_of_experts(spec is not None and spec.num_experts > 0)
    if not at:
        return
    ep = size_of(placement.axes, "ep")
    if settings.ep_dispatcher == "deep_ep" and ep > 1 and ep not in DEEP_EP_SIZES:
        sizes = ", ".join(map(str, DEEP_EP_SIZES))
        raise ConfigError(f'{at}: trainer.backend.ep_dispatcher = "deep_ep" is for {sizes} ranks')
    refused = {
        "optimizer.kind": (cfg.optimizer.kind, "adamw", "other optimizers need whole layers"),
        "backend.offload": (settings.offload == "master", False, "master weights stay awake"),
    }
    for key, (value, allowed, reason) in refused.items():
        if value != allowed:
            value = getattr(settings, key.removeprefix("backend."), value)
            raise ConfigError(f"{at} does not go with trainer.{key} = {value!r}: {reason}")


def check_shared_experts(wrap: Wrap, placement: Placement, spec: ModelSpec | None) -> None:
    """Raise a ConfigError where ranks cannot share the experts of a model, whether or not it
    learns.
    """
    at = placement.sharding_of_experts(spec is not None and spec.num_experts > 0)
    if not at:
        return
    if spec is not None:
        check_shares(spec, size_of(placement.axes, "ep"), at)
    if wrap == "model":
        raise ConfigError(
            f"{at} does not go with trainer.backend.wrap = 'model': experts are units of their own"
        )
