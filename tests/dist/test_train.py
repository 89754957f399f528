"""Training on 1, 2 and 4 gloo ranks, sharded and replicated: the same numbers."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_rl.algo.losses import LossInput, grpo_loss
from spmd_rl.errors import ContractError, SpmdError
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import make_batch, write_model_folder
from tests.dist.trainers import SCORED, Splits, own_shard, train, train_on_all_scores, weights

pytestmark = pytest.mark.dist

Report = dict[str, Any]
# one rank, two shards, and two replicas of two shards; each but the first resumes the one before
SPLITS = {
    "alone": RoleSplit(ranks="0-0"),
    "sharded": RoleSplit(ranks="0-1"),
    "hybrid": RoleSplit(dp=2),
}
BEFORE = {"sharded": "alone", "hybrid": "sharded"}
STEPS = range(3)
SAME = (*SCORED, "train/clip_frac", "train/lr", "onpolicy/k3")


def scores_after_a_broken_pass(trainer: Trainer, fresh: Trainer) -> list[list[float]]:
    """Have a layer of the trainer fail, and then return its scores with the fresh one's weights,
    and the fresh one's scores.
    """
    context = trainer.context
    batch = own_shard(context, make_batch())
    layer = trainer.backend.scorer.model.model.layers[1]

    def broken(*args: object, **named: object) -> None:
        raise ContractError("a layer fails")

    forward, layer.forward = layer.forward, broken
    with suppress(ContractError):
        trainer.learner.score(batch)
    layer.forward = forward
    trainer.backend.fill((name, fresh.backend.gather(name)) for name in fresh.backend.names())
    return [one.learner.score(batch).tolist() for one in (trainer, fresh)]


class Collectives(TorchDispatchMode):
    """Counts the operators of torch.distributed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            self.counts[op._opname] += 1
        return op(*args, **(kwargs or {}))


def num_collectives(trainer: Trainer) -> tuple[int, list[int]]:
    """Return the micro-batches of a step, and how often it gathers and reduces."""
    context, micros = trainer.context, 0
    batch = own_shard(context, make_batch())

    def counting(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal micros
        micros += 1
        return grpo_loss(out)

    with Collectives() as found:
        trainer.train_step(batch, counting)
    return micros, [found.counts[name] for name in ("_allgather_base_", "_reduce_scatter_base_")]


def poisoned(trainer: Trainer) -> str:
    """Return the error when the last rank's batch holds a NaN; weights must not change."""
    context = trainer.context
    batch = own_shard(context, make_batch())
    if context.rank == context.size - 1:
        batch = replace(batch, advantages=np.where(batch.mask, np.nan, 0).astype(np.float32))
    before = weights(trainer)
    try:
        trainer.train_step(batch, grpo_loss)
    except SpmdError as error:
        return str(error) if weights(trainer) == before else "the weights moved"
    return "nothing was raised"


def norms_around_a_failure(trainer: Trainer) -> list[float]:
    """Return the gradient norms of one batch before and after a step whose second micro-batch
    fails. At a rate of 0 the weights stay.
    """
    context, calls = trainer.context, count()
    batch = own_shard(context, make_batch())

    def broken(out: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        if next(calls):
            raise ContractError("a later micro-batch fails")
        return grpo_loss(out)

    before = trainer.train_step(batch, grpo_loss, lr=0.0)["train/grad_norm"]
    try:
        trainer.train_step(batch, broken)
    except ContractError:
        return [before, trainer.train_step(batch, grpo_loss, lr=0.0)["train/grad_norm"]]
    return [before]


def report_of(split: str, context: RoleContext, work: Path) -> Report:
    """Train a few steps on batches split over the ranks, and tell what must not depend on them."""
    cfg = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=150)

    def built(**settings: Any) -> Trainer:
        return Trainer(replace(cfg, **settings), context, str(work))

    trainer = built()
    report: Report = {"steps": train(trainer, STEPS), "weights": weights(trainer)}
    trainer.save(str(work / f"{split}.ckpt"))
    trainer.wait_until_saved()
    # Two sequences: with more ranks than sequences, some ranks have nothing but their collectives.
    few = own_shard(context, make_batch(9).select([0, 1]))
    report["few"] = trainer.train_step(few, grpo_loss)
    report["all_scores"] = train_on_all_scores(built())
    if split == "alone":
        return report
    layers = Fsdp2Config(recompute="all", wrap="layer")
    report["layers"] = train(built(backend=layers, max_tokens=60), STEPS)
    if split == "sharded":
        report["deterministic"] = train(built(deterministic=True), STEPS)
    trainer.export_hf(str(work / f"{split}.hf"))
    report["exported"] = weights(trainer)
    resumed = built(seed=5)
    report["resumed_version"] = resumed.load(str(work / f"{BEFORE[split]}.ckpt"))
    report["resumed"] = train(resumed, range(3, 6))
    return report | failures(trainer, [built(max_tokens=60, seed=seed) for seed in (0, 1, 2)])


def failures(trainer: Trainer, small: list[Trainer]) -> Report:
    """What passes and steps that fail leave behind, and the collectives of one that does not."""
    broken = [scores_after_a_broken_pass(*small[:2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)  # torch 2.11 has none
        broken.append(scores_after_a_broken_pass(*small[1:]))
    said = trainer.context.all_gather_bytes(poisoned(trainer).encode())
    return {
        "after_broken_pass": broken,
        "collectives": num_collectives(small[0]),
        "around_failure": norms_around_a_failure(small[2]),
        "poisoned": [blob.decode() for blob in said],
    }


def on_rank(world: World, work: Path) -> dict[str, Report]:
    splits = Splits(world, SPLITS)
    return splits.each(lambda split: report_of(split, splits.context(split), work))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("train"))


@pytest.fixture(scope="module")
def reports(work: Path) -> dict[str, Report]:
    return on_ranks(on_rank, 4, work)[0]


@pytest.fixture(scope="module")
def alone(reports: dict[str, Report]) -> Report:
    return reports["alone"]


@pytest.fixture(params=["sharded", "hybrid"])
def split(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def report(reports: dict[str, Report], split: str) -> Report:
    return reports[split]


def test_metrics_do_not_depend_on_the_ranks(alone: Report, report: Report) -> None:
    for step, expected in zip(report["steps"], alone["steps"], strict=True):
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name
        assert step["onpolicy/compared_tokens"] == expected["onpolicy/compared_tokens"]
    first_loss = [one["steps"][0]["train/loss"] for one in (alone, report)]
    assert first_loss[0] == pytest.approx(first_loss[1], rel=1e-13)
    assert alone["steps"][0]["onpolicy/compared_tokens"] == make_batch(0).mask.sum()


def test_weights_do_not_depend_on_the_ranks(alone: Report, report: Report) -> None:
    for name, values in alone["weights"].items():
        np.testing.assert_allclose(
            report["weights"][name], values, rtol=1e-4, atol=2e-5, err_msg=name
        )


def test_a_step_that_fails_in_a_later_micro_batch_leaves_no_gradients(report: Report) -> None:
    before, after = report["around_failure"]
    assert after == pytest.approx(before, rel=1e-6)


def test_a_pass_that_failed_leaves_no_gathered_weights(report: Report) -> None:
    first, second = report["after_broken_pass"]
    for after, expected in (first, second):
        assert after == expected
    assert first[1] != second[1]


def test_wrapping_layers_and_recomputing_them_changes_nothing(report: Report) -> None:
    for step, expected in zip(report["layers"], report["steps"], strict=True):
        for name in SAME:
            assert step[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-7), name


def test_a_small_model_is_gathered_and_reduced_once_a_step(report: Report) -> None:
    num_micros, num_collectives = report["collectives"]
    assert num_micros > 1
    assert num_collectives == [1, 1]


def test_sums_in_rank_order_are_those_of_two_ranks(reports: dict[str, Report]) -> None:
    """The sum of two gradients does not depend on which rank adds them."""
    sharded = reports["sharded"]
    for step, expected in zip(sharded["deterministic"], sharded["steps"], strict=True):
        assert {name: step[name] for name in SAME} == {name: expected[name] for name in SAME}


def test_ranks_without_a_sequence_take_part(alone: Report, report: Report) -> None:
    for name in SAME:
        assert report["few"][name] == pytest.approx(alone["few"][name], rel=1e-3, abs=1e-5), name


def test_gradients_of_entropy_and_candidates_do_not_depend_on_the_ranks(
    alone: Report, report: Report
) -> None:
    """In the second step, some of four ranks have no token to score."""
    for step, expected in zip(report["all_scores"], alone["all_scores"], strict=True):
        for name in SCORED:
            assert step[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_nan_on_one_rank_is_named_by_all_and_moves_nothing(report: Report) -> None:
    last = len(report["poisoned"]) - 1
    sentence = (
        f"train step 4: the loss is not finite on rank {last}; that optimizer step was not taken"
    )
    assert report["poisoned"] == [sentence] * (last + 1)


def test_a_checkpoint_resumes_on_another_number_of_ranks(reports: dict[str, Report]) -> None:
    """One rank's checkpoint on two, two ranks' on four; the steps after it are the same ones."""
    sharded, hybrid = reports["sharded"], reports["hybrid"]
    for name in SAME:
        for step, expected in zip(hybrid["resumed"], sharded["resumed"], strict=True):
            assert step[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    assert sharded["resumed_version"] == hybrid["resumed_version"] == 3


def test_an_export_holds_the_gathered_weights(split: str, report: Report, work: Path) -> None:
    folder = work / f"{split}.hf"
    for name, one in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(one.flatten(), np.array(report["exported"][name], np.float32))
