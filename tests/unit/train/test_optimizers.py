"""Optimizers over one rank's shards, against torch's own on whole tensors; many ranks are in
tests/dist/test_optimizers.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import OptimizerConfig, TrainerConfig
from spmd_rl.train.optimizer.optimizers import ShardOptimizer, build_optimizer
from spmd_rl.train.optimizer.parameter_groups import update_rules
from tests.dist.optimizer_case import BLOCKS, SHAPES, config, gradients, rate, shards, weights
from tests.dist.train_case import make_batch, write_model_folder

pytestmark = pytest.mark.usefixtures("context")
COMPILERS = [name for name in ("g++", "clang++") if shutil.which(name)]


def built(cfg: TrainerConfig, shapes=SHAPES) -> tuple[ShardOptimizer, dict[str, Tensor]]:
    held = shards(shapes, 0, 1, "cpu")
    rules = update_rules(shapes, cfg, 1)
    optimizer = build_optimizer(held, rules, cfg, dist.group.WORLD)
    return optimizer, {name: shard.local for name, shard in held.items()}


def take_steps(cfg: TrainerConfig, shapes=SHAPES) -> dict[str, Tensor]:
    optimizer, local = built(cfg, shapes)
    for step, grads in enumerate(gradients(shapes)):
        for name, one in local.items():
            one.grad = grads[name]
        optimizer.step(rate(step))
    return {name: one.detach() for name, one in local.items()}


def plain_steps(cfg: TrainerConfig, make, dtype=torch.float32, shapes=SHAPES) -> dict[str, Tensor]:
    """The same steps by optimizers that `make(parameters, lr, weight_decay)` makes, one for each
    parameter.
    """
    found = {}
    for name, first in weights(shapes).items():
        one = nn.Parameter(first.to(dtype))
        scale = 2.0 if "up_proj" in name else 0.5 if name.endswith("bias") else 1.0
        decay = 0.3 if name.endswith("bias") else 0.1 if one.dim() > 1 else 0.0
        optimizer = make(name, [one], lr=cfg.lr, weight_decay=decay)
        for step, grads in enumerate(gradients(shapes)):
            (group,) = optimizer.param_groups
            group["lr"] = rate(step) * scale
            one.grad = grads[name].to(dtype)
            optimizer.step()
        found[name] = one.detach()
    return found


def adamw(name: str, parameters, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.8, 0.95), eps=1e-8, fused=True, **options)


def unfused(name: str, parameters, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.8, 0.95), eps=1e-8, foreach=False, **options)


def muon(adjust_lr: str, momentum: float = 0.95):
    def make(name: str, parameters, **options) -> torch.optim.Optimizer:
        if not name.startswith("model.layers.") or parameters[0].dim() == 1:
            return adamw(name, parameters, **options)
        return torch.optim.Muon(parameters, adjust_lr_fn=adjust_lr, momentum=momentum, **options)

    return make


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_adamw_is_torchs_bit_for_bit() -> None:
    cfg = config("adamw")
    assert_equal(take_steps(cfg), plain_steps(cfg, adamw))


def test_adamw_in_float64() -> None:
    cfg = config("adamw")
    for name, expected in plain_steps(cfg, unfused, torch.float64).items():
        torch.testing.assert_close(take_steps(cfg)[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adjust_lr", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("momentum", [0.95, 0.5])
def test_muon_is_torchs_bit_for_bit(adjust_lr: str, momentum: float) -> None:
    cfg = config("muon", adjust_lr=adjust_lr, momentum=momentum)
    found, expected = take_steps(cfg), plain_steps(cfg, muon(adjust_lr, momentum))
    assert_equal(found, expected)
    other = plain_steps(cfg, muon(adjust_lr, 0.7))
    differing = {name for name in found if not torch.equal(found[name], other[name])}
    assert differing == {name for name in SHAPES if ".layers." in name and "bias" not in name}


class MuonInFloat64(torch.optim.Optimizer):
    """Muon as its authors write it, with the polar factor from an SVD of the quintic's values."""

    def __init__(self, parameters, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        (one,) = group["params"]
        buffer = self.state[one].setdefault("b", torch.zeros_like(one))
        buffer.mul_(0.95).add_(one.grad, alpha=0.05)
        update = 0.05 * one.grad + 0.95 * buffer
        left, values, right = torch.linalg.svd(update, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        one.mul_(1 - group["lr"] * group["weight_decay"])
        scale = 0.2 * math.sqrt(max(one.shape))
        one.sub_(group["lr"] * scale * (left * values) @ right)


def test_muon_in_float64() -> None:
    """To the precision of torch's, which iterates in bfloat16."""

    def make(name: str, parameters, **options) -> torch.optim.Optimizer:
        if not name.startswith("model.layers.") or parameters[0].dim() == 1:
            return unfused(name, parameters, **options)
        return MuonInFloat64(parameters, **options)

    cfg = config("muon")
    found, first = take_steps(cfg), weights(SHAPES)
    for name, expected in plain_steps(cfg, make, torch.float64).items():
        moved = (expected - first[name]).norm()
        assert (found[name] - expected).norm() < 0.03 * moved, name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_goes_on_bit_for_bit(kind: str) -> None:
    cfg = config(kind)
    whole, resumed = built(cfg), built(cfg)
    for step, grads in enumerate(gradients(SHAPES)):
        if step == 2:
            copy_state(whole, resumed)
            resumed[0].on_loaded(2)
        for optimizer, local in (whole, resumed):
            for name, one in local.items():
                one.grad = grads[name] * (1 if optimizer is whole[0] or step >= 2 else 3)
            optimizer.step(rate(step))
    assert_equal(resumed[1], whole[1])


def copy_state(source, target) -> None:
    for name, one in source[1].items():
        target[1][name].detach().copy_(one.detach())
    state = target[0].state()
    for kind, tensors in source[0].state().items():
        for (_, one), (_, other) in zip(tensors, state[kind], strict=True):
            other.local.copy_(one.local)


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    state = built(config("muon"))[0].state()
    matrices = {name for name in SHAPES if ".layers." in name and "bias" not in name}
    assert {name for name, _ in state["momentum_buffer"]} == matrices
    assert {name for name, _ in state["exp_avg"]} == SHAPES.keys() - matrices


def test_without_torchao_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        ConfigError,
        match=r"trainer.optimizer.kind = 'adamw8bit' needs torchao, which cannot be imported "
        r"\(.*\): pip install -e '.\[torchao\]' in the repository of spmd_rl, "
        r"or set the kind to 'adamw'",
    ):
        built(config("adamw8bit"))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.skipif(not COMPILERS, reason="torchao compiles its step: install g++ or clang++")
@pytest.mark.filterwarnings("ignore")
class TestEightBits:
    @pytest.fixture(autouse=True)
    def _compiled_here(self) -> Iterator[None]:
        """Compile in this process: workers of the compiler would outlive the tests."""
        from torch._inductor import config as inductor

        with inductor.patch(compile_threads=1):
            yield

    def test_they_are_torchaos_bit_for_bit(self) -> None:
        from torchao.optim import AdamW8bit

        cfg = config("adamw8bit")
        name = "model.layers.0.mlp.up_proj.weight"
        one = nn.Parameter(weights(BLOCKS)[name])
        optimizer = AdamW8bit([one], lr=cfg.lr, betas=cfg.betas, weight_decay=0.1)
        for step, grads in enumerate(gradients(BLOCKS)):
            optimizer.param_groups[0]["lr"].fill_(rate(step) * 2)
            one.grad = grads[name]
            optimizer.step()
        found = take_steps(cfg, BLOCKS)
        assert torch.equal(found[name], one.detach())
        exact = take_steps(config("adamw"), BLOCKS)
        assert not torch.equal(found[name], exact[name])
        torch.testing.assert_close(found[name], exact[name], rtol=0, atol=0.02)
        assert torch.equal(found["model.norm.weight"], exact["model.norm.weight"])

    def test_state_is_small_and_goes_on_bit_for_bit(self) -> None:
        cfg = config("adamw8bit")
        whole, resumed = built(cfg, BLOCKS), built(cfg, BLOCKS)
        state = {kind: dict(tensors) for kind, tensors in whole[0].state().items()}
        name = "model.layers.0.mlp.up_proj.weight"
        assert state["exp_avg_codes"][name].local.dtype == torch.uint8
        assert state["exp_avg_scale"][name].shape == (80 * 128 // 256,)
        for step, grads in enumerate(gradients(BLOCKS)):
            if step == 2:
                copy_state(whole, resumed)
                resumed[0].on_loaded(2)
            for optimizer, local in (whole, resumed):
                for key, one in local.items():
                    one.grad = grads[key] * (1 if optimizer is whole[0] or step >= 2 else 3)
                optimizer.step(rate(step))
        assert_equal(resumed[1], whole[1])

    def test_a_trainer_resumes_bit_for_bit(self, new_trainer, tmp_path: Path) -> None:
        model = write_model_folder(tmp_path / "model")
        config_file = model / "config.json"
        sizes = {"hidden_size": 64, "intermediate_size": 128}
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | sizes))
        options = {"model": model, "optimizer": OptimizerConfig("adamw8bit")}
        whole, resumed = new_trainer(**options), new_trainer(seed=3, **options)
        whole.train_step(make_batch(0), grpo_loss)
        whole.save(str(tmp_path / "saved"))
        whole.wait_until_saved()
        resumed.load(str(tmp_path / "saved"))
        for one in (whole, resumed):
            one.train_step(make_batch(1), grpo_loss)
        states = [
            {(kind, name): one.local for kind in state for name, one in state[kind]}
            for state in (whole.backend.state(), resumed.backend.state())
        ]
        assert ("exp_avg_codes", "model.layers.0.mlp.up_proj.weight") in states[0]
        assert all(torch.equal(one, states[1][key]) for key, one in states[0].items())


def test_one_part_for_each_algorithm(context: RoleContext) -> None:
    kinds = {kind: list(built(config(kind))[0].state()) for kind in ("adamw", "muon")}
    assert kinds == {
        "adamw": ["exp_avg", "exp_avg_sq"],
        "muon": ["exp_avg", "exp_avg_sq", "momentum_buffer"],
    }
