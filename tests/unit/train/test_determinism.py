"""`trainer.deterministic`: what it pins, what it refuses, and that it leaves torch as it was."""

from __future__ import annotations

import pytest
import torch

from spmd_rl.algo.losses import LossInput, grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.kernels import unproven
from spmd_rl.kernels.attention import backend
from spmd_rl.mesh.split import Placement, RoleSplit, plan_split
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.fsdp2.axes import check_axes
from spmd_rl.train.fsdp2.determinism import WORKSPACE, deterministic, require_deterministic
from tests.dist.train_case import local_weights, make_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def scattering_loss(out: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Writes to places that could be the same: torch has no order for that."""
    torch.zeros(8).put_(out.sequence % 8, out.logprobs.detach())
    return -out.logprobs, {}


def test_a_loss_without_an_order_is_refused_by_name(new_trainer) -> None:
    with pytest.raises(RuntimeError, match="put_ .*does not have a deterministic implementation"):
        new_trainer(deterministic=True).train_step(make_batch(), scattering_loss)
    assert not torch.are_deterministic_algorithms_enabled()
    new_trainer().train_step(make_batch(), scattering_loss)


def test_the_same_step_on_the_cpu(new_trainer) -> None:
    """There the order is fixed anyhow: the setting changes no bit."""
    trainers = [new_trainer(deterministic=chosen) for chosen in (False, True)]
    for trainer in trainers:
        trainer.train_step(make_batch(), grpo_loss)
    held = [local_weights(trainer) for trainer in trainers]
    assert all(torch.equal(one.local, held[1][name].local) for name, one in held[0].items())


def test_torch_is_left_as_it_was() -> None:
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic(False):
            assert torch.is_deterministic_algorithms_warn_only_enabled(), "somebody else chose it"
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.utils.deterministic.fill_uninitialized_memory


def placed(**axes: int) -> Placement:
    return plan_split({"train": RoleSplit(**axes)}, 2).train


def test_what_has_no_fixed_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_deterministic(CPU, torch.float32, 10)
    with pytest.raises(ConfigError, match="gradients of 2 replicas"):
        check_axes(TrainerConfig(deterministic=True), placed(dp=2), None)
    check_axes(TrainerConfig(deterministic=True), placed(dp=1), None)
    with pytest.raises(ConfigError, match="not float32 and 64"):
        require_deterministic(CUDA, torch.float32, 64)
    monkeypatch.setattr(backend, "flash_supports", lambda *given: True)
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.raises(
        ConfigError, match="CUBLAS_WORKSPACE_CONFIG is :0:0, but must be :4096:8 or :16:8"
    ):
        require_deterministic(CUDA, torch.bfloat16, 64)
    monkeypatch.delenv(WORKSPACE)
    require_deterministic(CUDA, torch.bfloat16, 64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(unproven, "are_allowed", True)
    require_deterministic(CUDA, torch.bfloat16, 576, latent_dim=512)
