"""A frozen model scores with the trainer's bits, keeps its weights between pushes, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.errors import ConfigError, ContractError, DataError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.train.config import FrozenConfig, TrainerConfig
from spmd_rl.train.frozen import UNCHANGED_FILE, FrozenModel
from spmd_rl.train.trainer import Trainer
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import alias, execute
from spmd_rl.weights.plan.layout_rules import compressed
from spmd_rl.weights.plan.moves import plan_moves
from tests.dist.train_case import make_batch

NewFrozen = Callable[..., FrozenModel]


@pytest.fixture
def new_frozen(context: RoleContext, model_folder: Path) -> NewFrozen:
    def build(**options: object) -> FrozenModel:
        model = str(options.pop("model", model_folder))
        return FrozenModel(FrozenConfig(**({"init": "random"} | options)), context, model)

    return build


def push(trainer: Trainer, frozen: FrozenModel, version: int) -> None:
    """Do what a link does on one rank, memory that could be shared included."""
    source, sink = trainer.weight_source(), frozen.weight_sink()
    layouts = [compressed(end.layout(0)) for end in (source, sink)]
    plan = plan_moves(layouts[:1], layouts[1:], {0: 0}, 0)
    ends = LocalEnds(0, source, sink, torch.device("cpu"), alias(source, sink, 0))
    sink.open()
    execute(plan.moves, ends, None)
    sink.commit(version)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrap", ["model", "layer"])
def test_log_probs_have_the_trainers_bits(new_trainer, new_frozen, dtype: str, wrap: str) -> None:
    trainer = new_trainer(dtype=dtype, max_tokens=60, wrap=wrap)
    frozen, batch = new_frozen(dtype=dtype, logit_rows=9), make_batch()
    assert {one.local.dtype for one in frozen.backend.local_weights().values()} == {
        getattr(torch, dtype)
    }
    assert not any(parameter.requires_grad for parameter in frozen.backend.parameters.values())
    expected = trainer.score(batch)
    scores = frozen.score(batch)
    assert scores.values.tobytes() == expected.values.tobytes()
    assert np.array_equal(scores.lengths, expected.lengths)
    assert frozen.numeric_contract() == trainer.numeric_contract()
    one_bit = next(iter(frozen.backend.local_weights().values())).local.detach()
    one_bit.view(torch.int32 if dtype == "float32" else torch.int16).bitwise_xor_(1)
    assert frozen.score(batch).values.tobytes() != expected.values.tobytes()


def test_a_push_refreshes_it_and_nothing_else_does(new_trainer, new_frozen) -> None:
    """Even where a trainer's memory is of the same dtype in the same process."""
    trainer, frozen, batch = new_trainer(), new_frozen(), make_batch()
    first = frozen.score(batch).values
    push(trainer, frozen, 0)
    assert np.array_equal(frozen.score(batch).values, first)
    trainer.train_step(batch, grpo_loss)
    assert np.array_equal(frozen.score(batch).values, first)
    assert not np.array_equal(trainer.score(batch).values, first)
    push(trainer, frozen, 1)
    assert frozen.version() == 1
    assert np.array_equal(frozen.score(batch).values, trainer.score(batch).values)


def test_a_push_casts(new_trainer, new_frozen) -> None:
    trainer, frozen, batch = new_trainer(seed=5), new_frozen(dtype="bfloat16"), make_batch()
    push(trainer, frozen, 3)
    expected = new_frozen(dtype="bfloat16", seed=5).score(batch).values
    assert np.array_equal(frozen.score(batch).values, expected)


def test_it_does_not_score_with_half_a_push(new_frozen) -> None:
    frozen = new_frozen()
    sink = frozen.weight_sink()
    sink.open()
    with pytest.raises(ContractError, match="partly those of a push that failed: push again"):
        frozen.score(make_batch())
    sink.commit(2)
    frozen.score(make_batch())


def test_a_checkpoint_is_empty_until_a_push(new_trainer, new_frozen, tmp_path: Path) -> None:
    frozen, batch = new_frozen(), make_batch()
    first = frozen.score(batch).values
    frozen.save(str(tmp_path / "unchanged"))
    frozen.wait_until_saved()
    assert [path.name for path in (tmp_path / "unchanged").iterdir()] == [UNCHANGED_FILE]
    push(new_trainer(seed=5), frozen, 7)
    pushed = frozen.score(batch).values
    frozen.save(str(tmp_path / "pushed"))
    frozen.wait_until_saved()
    resumed = new_frozen()
    assert resumed.load(str(tmp_path / "pushed")) == resumed.version() == 7
    assert np.array_equal(resumed.score(batch).values, pushed)
    assert resumed.resume_differences() == []
    assert resumed.load(str(tmp_path / "unchanged")) == -1
    assert np.array_equal(resumed.score(batch).values, first)
    assert not np.array_equal(first, pushed)
    (tmp_path / "unchanged" / UNCHANGED_FILE).unlink()
    with pytest.raises(ConfigError, match="is not a trainer checkpoint"):
        resumed.load(str(tmp_path / "unchanged"))


def test_a_checkpoint_of_another_dtype_or_damaged_is_refused(
    new_trainer, new_frozen, tmp_path: Path
) -> None:
    frozen = new_frozen()
    push(new_trainer(seed=5), frozen, 1)
    frozen.save(str(tmp_path / "saved"))
    frozen.wait_until_saved()
    with pytest.raises(ConfigError, match=r"is float32 \[50, 36\], not bfloat16"):
        new_frozen(dtype="bfloat16").load(str(tmp_path / "saved"))
    file = next((tmp_path / "saved").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(SpmdError, match=r"\.safetensors"):
        new_frozen().load(str(tmp_path / "saved"))


def test_the_likeliest_tokens(new_trainer, new_frozen) -> None:
    """Against a sort of all log-probs, each scored by the trainer as if it were the next token."""
    frozen, batch = new_frozen(logit_rows=7, max_tokens=60), make_batch()
    top = frozen.top_logprobs(batch, 4)
    assert (top.ids.values.dtype, top.logprobs.values.dtype) == (np.int32, np.float32)
    assert top.ids.values.shape == top.logprobs.values.shape == (batch.num_tokens, 4)
    trainer = new_trainer()
    every = np.stack(
        [
            trainer.learner.score(only_token(batch, position, token))[position]
            for position in np.flatnonzero(batch.mask)[:3]
            for token in range(50)
        ]
    ).reshape(3, 50)
    order = np.argsort(-every, axis=1)[:, :4]
    rows = np.flatnonzero(batch.mask)[:3]
    assert np.array_equal(top.ids.values[rows], order)
    assert np.array_equal(top.logprobs.values[rows], np.take_along_axis(every, order, axis=1))
    assert not top.logprobs.values[~batch.mask].any()


def only_token(batch, position: int, token: int):
    """The batch with another token at a position, of which alone the log-prob is asked for."""
    tokens, mask = batch.tokens.copy(), np.zeros_like(batch.mask)
    tokens[position], mask[position] = token, True
    return replace(batch, tokens=tokens, mask=mask)


@pytest.mark.parametrize("k", [0, 51])
def test_more_tokens_than_there_are_cannot_be_asked_for(new_frozen, k: int) -> None:
    with pytest.raises(ContractError, match=f"k = {k}: the model has 50 tokens to choose from"):
        new_frozen().top_logprobs(make_batch(), k)


def test_what_it_has_no_head_for_is_refused(new_frozen) -> None:
    with pytest.raises(ContractError, match="a language model has no values"):
        new_frozen().rewards(make_batch())


def test_a_sequence_that_is_too_long_is_named(new_frozen) -> None:
    batch = make_batch(longest=300)
    with pytest.raises(DataError, match="more than the model's 160 positions"):
        new_frozen().score(batch)


def test_its_settings_can_be_a_trainers() -> None:
    trainer = TrainerConfig(init="random", seed=3, dtype="float32", attention_split=256)
    frozen = FrozenConfig.like(trainer)
    assert (frozen.init, frozen.seed, frozen.dtype) == ("random", 3, "float32")
    assert frozen.attention_split == 256
    with pytest.raises(ConfigError, match="attention_split = 5"):
        FrozenConfig(attention_split=5)
