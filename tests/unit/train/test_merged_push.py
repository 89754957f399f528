"""The source of a merged push on one rank: its bits, its boxes, its memory, and its settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.check.engine import announce_correction, check_engine
from spmd_rl.config.run import RunConfig
from spmd_rl.errors import ConfigError, ResidencyError
from spmd_rl.model.linear import merged
from spmd_rl.model.lora import LoraConfig, is_adapter
from spmd_rl.offload.phases import ALL, COLOCATED, RoleSleep
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.plan.layout import Box
from tests.dist.train_case import make_batch

LORA = LoraConfig(rank=4, alpha=7.0, merged_push=True)
NewTrainer = Callable[..., Trainer]


def learned(new_trainer: NewTrainer, dtype: str = "float32", lora: LoraConfig = LORA) -> Trainer:
    trainer = new_trainer(lora=lora, dtype=dtype)
    trainer.train_step(make_batch(0), grpo_loss)
    return trainer


def half_unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance from each value to the next one that `dtype` has."""
    return 0.5 * torch.finfo(dtype).eps * torch.exp2(values.abs().log2().floor())


def pushed(trainer: Trainer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what a push brings, by name."""
    source, found = trainer.weight_source(), dict[str, Tensor]()
    source.open()
    for piece in source.layout(0).pieces:
        found[piece.name] = torch.empty(piece.shape, dtype=dtype)
        source.read(piece.name, piece.box, found[piece.name])
    return found


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_exact_but_for_its_roundings(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=generator) for shape in ((60, 33), (5, 33), (60, 5))
    )
    weight = weight.to(dtype)
    exact = weight.double() + 1.4 * (b.double() @ a.double())
    found = merged(weight, a, b, 1.4).to(dtype)
    # float32 rounds the product, its scale and the sum before the last rounding
    size = weight.double().abs() + 1.4 * (b.abs().double() @ a.abs().double())
    before = 4 * torch.finfo(torch.float32).eps * size
    assert ((found - exact).abs() <= half_unit(exact, dtype) * (1 + 1e-6) + before).all()
    assert ((weight - exact).abs() > 1e-2).any(), "adapters matter"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_push_brings_each_weight_merged(new_trainer: NewTrainer, dtype: str) -> None:
    trainer, kind = learned(new_trainer, dtype), getattr(torch, dtype)
    stored = trainer.backend.parameters
    found = pushed(trainer, kind)
    assert found.keys() == {name for name in stored if not is_adapter(name)}
    num_changed = 0
    for name, weight in found.items():
        layer, base = name.removesuffix(".weight"), stored[name].detach()
        assert base.dtype == kind
        if f"{layer}.lora_B.weight" in stored:
            a, b = (trainer.backend.gather(f"{layer}.lora_{one}.weight").detach() for one in "AB")
            num_changed += not torch.equal(weight, base)
            exact = base.double() + 7 / 4 * (b.double() @ a.double())
            near = half_unit(exact, kind) * (1 + 1e-6) + 1e-6
            assert ((weight - exact).abs() <= near).all(), name
        else:
            assert torch.equal(weight, base)
    assert num_changed == 3 * 7


def test_a_box_has_the_bits_of_the_whole_weight(new_trainer: NewTrainer) -> None:
    """As a push may cut a weight, and compares what it made with what arrived."""
    trainer = learned(new_trainer)
    whole = pushed(trainer, torch.float32)
    source, name = trainer.weight_source(), "model.layers.1.mlp.gate_proj.weight"
    source.open()
    box = Box((7, 5), (11, 30))
    part = torch.empty(box.extent)
    source.read(name, box, part)
    assert torch.equal(part, whole[name][7:18, 5:35])
    assert source.view(name, box) is None
    norm = "model.norm.weight"
    view = source.view(norm, Box((0,), (36,)))
    assert view is not None and view.data_ptr() == trainer.backend.local[norm].data_ptr()


def test_a_later_push_brings_what_was_learned(new_trainer: NewTrainer) -> None:
    trainer = learned(new_trainer)
    source, name = trainer.weight_source(), "model.layers.0.self_attn.q_proj.weight"
    box, seen = Box((0, 0), (40, 36)), []
    for seed in (1, 2):
        source.open()
        seen.append(torch.empty(box.extent))
        source.read(name, box, seen[-1])
        trainer.train_step(make_batch(seed), grpo_loss)
    assert not torch.equal(*seen)


def test_the_base_is_awake_in_a_merged_push(context, model_folder) -> None:
    """And in no other phase in which it could sleep; its bytes go to the host once."""
    awake = {phase: roles.get("train", ()) for phase, roles in COLOCATED.awake.items()}
    cfg = TrainerConfig(init="random", lr=1e-2, lora=LORA)
    trainer = Trainer(cfg, context, str(model_folder), RoleSleep("train", awake))
    copied = []
    for seed in range(3):
        trainer.train_step(make_batch(seed), grpo_loss)
        copied.append(trainer.sleep()[0].copied_bytes)
        with pytest.raises(ResidencyError, match="a push needs memory 'master'"):
            trainer.weight_source().open()
        trainer.wake(("master",))
        with pytest.raises(ResidencyError, match=r"'pushed_base' of train.*\(sync, train\)"):
            trainer.weight_source().open()
        trainer.wake(("pushed_base",))
        trainer.weight_source().open()
        trainer.wake()
    base_bytes = sum(trainer.backend.local[name].nbytes for name in trainer.backend.base)
    assert copied[0] - copied[1] == base_bytes
    assert copied[1] == copied[2] > 0
    plain = Trainer(
        TrainerConfig(init="random", lora=LoraConfig(rank=4)),
        context,
        str(model_folder),
        RoleSleep("train", awake | {"train": ALL}),
    )
    plain.sleep()
    plain.wake(("master",))
    plain.weight_source().open()
    assert not plain.memory.is_awake("base"), "a push of adapters needs no base"


def test_the_contract_says_that_bits_differ(new_trainer: NewTrainer) -> None:
    merging, plain = (
        new_trainer(lora=lora).numeric_contract() for lora in (LORA, LoraConfig(4, 7.0))
    )
    assert merging == plain | {"push": "adapters merged into rounded weights, no promise"}


def test_an_exact_run_refuses_a_merged_push(capsys: pytest.CaptureFixture[str]) -> None:
    engine, trainer = NativeEngineConfig(), TrainerConfig(lora=LORA)
    with pytest.raises(ConfigError, match=r"merged_push = true .* set run\.exact = false"):
        check_engine(engine, RunConfig(), trainer)
    check_engine(engine, RunConfig(exact=False), trainer)
    check_engine(engine, RunConfig(), TrainerConfig(lora=LoraConfig(rank=4)))
    announce_correction(engine, "none", trainer)
    assert capsys.readouterr().out.startswith("trainer.lora.merged_push = true: the engine's")
    with pytest.raises(ConfigError, match=r"^merged_push = True: expected false without a rank"):
        LoraConfig(merged_push=True)
