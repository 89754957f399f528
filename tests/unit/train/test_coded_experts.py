"""Training a mixture with weights in few bits: its passes, its pushes, and what finds faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.formats.coded_weights import scale_name
from spmd_rl.model.formats.e4m3 import E4M3
from spmd_rl.model.layers.moe_module import MoeMlp
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.local_tensors import LocalTensors
from tests.dist.train_case import make_batch
from tests.unit.train.test_coded_masters import (
    FAMILIES,
    NewTrainer,
    masters,
    pushed,
    scores_of,
    verified,
    write_wide,
)

EXPERT = "model.layers.1.mlp.experts.4.down_proj.weight"


@pytest.fixture(scope="module", params=FAMILIES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(tmp_path_factory.mktemp("mixture") / "model", request.param)


def flip_a_code(held: LocalTensors) -> str:
    held[EXPERT].local.view(torch.uint8)[3, 5] ^= 1
    return EXPERT


def spoil_a_scale(held: LocalTensors) -> str:
    """Make a scale no power of two, which bfloat16 would not hold exactly."""
    held[scale_name(EXPERT)].local[0, 1] *= 1.25
    return scale_name(EXPERT)


@pytest.mark.parametrize("spoil", [flip_a_code, spoil_a_scale])
def test_one_expert_that_differs_after_a_push_is_found_and_named(
    new_trainer: NewTrainer, mixture: Path, spoil: Callable[[LocalTensors], str]
) -> None:
    trainer = new_trainer(model=mixture, init="folder", weights="e4m3")
    verifier, held, _ = verified(trainer)
    name = spoil(held)
    proof = verifier.compare(None)
    assert (proof.num_unequal, [one.name for one in proof.mismatches]) == (1, [name])


def is_power_of_two(scales: Tensor) -> bool:
    return bool((scales.view(torch.int32) & 0x7FFFFF == 0).all())


def test_every_scale_is_a_power_of_two(new_trainer: NewTrainer, mixture: Path) -> None:
    found = pushed(new_trainer(model=mixture, init="folder", weights="e4m3"))
    scales = [one for name, one in found.items() if name.endswith("_scale_inv")]
    assert scales and all(map(is_power_of_two, scales))
    assert not is_power_of_two(1.25 * E4M3.scales_of(torch.ones(1)))


def test_experts_of_a_layer_are_rounded_together(
    new_trainer: NewTrainer, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up of one shape at once, then down; other weights one by one."""
    trainer = new_trainer(model=mixture, init="folder", weights="e4m3")
    counts, rounded_each = list[int](), block_codes.rounded_each

    def counted(*given: Any) -> Tensor:
        counts.append(len(given[1]))
        return rounded_each(*given)

    monkeypatch.setattr(block_codes, "rounded_each", counted)
    scores_of(trainer, make_batch(0))
    layers = [one for one in trainer.backend.scorer.modules() if isinstance(one, MoeMlp)]
    num_experts = layers[0].num_experts
    together = [one for one in counts if one > 1]
    assert len(together) % (2 * len(layers)) == 0 and together
    assert set(together) == {num_experts, 2 * num_experts}


def test_a_gathering_that_was_broken_off_leaves_no_rows_of_its_version(
    new_trainer: NewTrainer, mixture: Path
) -> None:
    trainer = new_trainer(model=mixture, init="folder", weights="e4m3")
    first, last = EXPERT, EXPERT.replace("experts.4", "experts.0")
    gathered_of(trainer, first)
    before = gathered_of(trainer, last)
    gathered_of(trainer, first)
    trainer.train_step(make_batch(0), grpo_loss)
    after = gathered_of(trainer, last)
    assert not torch.equal(after, before)
    assert torch.equal(
        after, block_codes.quantised(E4M3, masters(trainer)[last]).decoded(torch.float32)
    )


def gathered_of(trainer: Trainer, name: str) -> Tensor:
    """Return what FSDP's hook of a weight makes, as the one shard has it."""
    parameter = trainer.backend.scorer.model.get_parameter(name)
    local: Any = parameter._local_tensor  # type: ignore[attr-defined]
    (rows,), _ = local.fsdp_pre_all_gather(None, None, None, None, None)
    found: Tensor = rows
    return found
