"""A format of weights in blocks of 32 columns, which one file says, and all that uses formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.low_precision import block_codes
from spmd_rl.model.formats import FORMATS
from spmd_rl.model.formats.coded_tensors import as_codes, as_rounded
from spmd_rl.model.formats.coded_weights import coded_shapes, format_of
from spmd_rl.rollout.memory import engine_memory
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.train.checkpoint.export import saved_weights
from spmd_rl.train.trainer import Trainer
from tests.dist.train_case import make_batch
from tests.planted.e2m1 import E2M1
from tests.unit.rollout.test_coded_weights import converted, drawn, engine_of, unchanged
from tests.unit.train.test_coded_masters import (
    masters,
    pushed,
    rounded_masters,
    scores_of,
    verified,
)

NewTrainer = Callable[..., Trainer]
NAME = E2M1.name


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, E2M1)  # type: ignore[misc]


def test_each_block_of_32_columns_has_its_scale() -> None:
    values = torch.tensor([[6000.0] * 32 + [0.75] * 32 + [-3.5] * 7])
    coded = block_codes.quantised(E2M1, values)
    assert (tuple(coded.codes.shape), coded.scales.tolist()) == ((1, 48), [[1024, 0.125, 1]])
    assert coded.decoded(torch.float32).tolist() == [[6144] * 32 + [0.75] * 32 + [-3] * 7]


def test_it_trains_with_what_its_codes_stand_for(new_trainer: NewTrainer) -> None:
    coded, plain = new_trainer(weights=NAME), new_trainer()
    coded.train_step(make_batch(0), grpo_loss)
    plain.backend.fill(rounded_masters(coded, NAME).items())
    scores = scores_of(coded, make_batch(1))
    assert np.array_equal(scores, scores_of(plain, make_batch(1)))
    plain.backend.fill(masters(coded).items())
    assert not np.array_equal(scores, scores_of(plain, make_batch(1)))


def test_a_push_brings_it_and_a_wrong_code_is_found(new_trainer: NewTrainer) -> None:
    trainer = new_trainer(weights=NAME)
    verifier, held, traffic = verified(trainer, NAME)
    spec = trainer.backend.scorer.model.spec
    shapes = coded_shapes(spec, NAME)  # type: ignore[arg-type]
    whole = spec.num_parameters - sum(rows * columns for rows, columns in shapes.values())
    assert traffic.copied_bytes == sum(map(E2M1.num_bytes, shapes.values())) + 4 * whole
    name = min(shapes)
    held[name].local[3, 5] ^= 0x10
    assert [one.name for one in verifier.compare(None).mismatches] == [name]


def test_it_is_saved_and_goes_on(new_trainer: NewTrainer, tmp_path: Path) -> None:
    first, second = new_trainer(weights=NAME), new_trainer(weights=NAME, seed=1)
    first.train_step(make_batch(0), grpo_loss)
    first.save(str(tmp_path / "saved"))
    first.wait_until_saved()
    second.load(str(tmp_path / "saved"))
    assert all(torch.equal(one, pushed(second)[name]) for name, one in pushed(first).items())
    with saved_weights(tmp_path / "saved", first.model) as saved:
        assert saved.base_format == NAME == format_of(E2M1.rule)


def test_an_engine_draws_the_bits_of_what_its_codes_stand_for() -> None:
    codes = drawn(engine_of(NAME, converted(as_codes, NAME)))  # type: ignore[arg-type]
    rounded = converted(as_rounded, NAME)  # type: ignore[arg-type]
    assert codes == drawn(engine_of("full", rounded))
    assert codes != drawn(engine_of("full", converted(unchanged)))


def test_a_plan_counts_its_bytes(new_trainer: NewTrainer) -> None:
    spec = new_trainer().backend.scorer.model.spec
    cfg = NativeEngineConfig()
    full, coded = (
        engine_memory(spec, replace(cfg, weights=weights), True)[0].num_bytes  # type: ignore[arg-type]
        for weights in ("full", NAME)
    )
    shapes = coded_shapes(spec, NAME).values()  # type: ignore[arg-type]
    assert full - coded == sum(2 * rows * columns for rows, columns in shapes) - sum(
        map(E2M1.num_bytes, shapes)
    )
