"""Mixtures, critics and frozen models on gloo ranks that share matrices, sequences and experts: the
same bits of log-probs and values as on ranks that share nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.parts.part import ModelPart
from spmd_rl.train.config import FrozenConfig, Fsdp2Config
from spmd_rl.train.frozen import FrozenModel
from spmd_rl.train.value_trainer import ValueTrainer
from tests.dist.test_roles import squares, with_returns
from tests.dist.test_tensor_shards import CONFIG, Runs
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import (
    make_batch,
    with_sizes,
    write_glm_folder,
    write_mixture_folder,
    write_model_folder,
)
from tests.dist.trainers import Splits, digests, gradients, in_order, logprobs, top, train

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SPLITS = {
    "alone": RoleSplit(),
    "tp 2": RoleSplit(tp=2),
    "tp 2, ep 2": RoleSplit(tp=2, ep=2),
    "tp 2, ep 4": RoleSplit(tp=2, ep=4),
    "tp 4, ep 2": RoleSplit(tp=4, ep=2),
    "tp 2, cp 2": RoleSplit(tp=2, cp=2),
    "cp 2, ep 4": RoleSplit(cp=2, ep=4),
}
DENSE = ("alone", "tp 2", "tp 2, cp 2")
BALANCED = ("alone", "tp 2", "tp 2, ep 4")
EXPERTS = {"ep 2": RoleSplit(ep=2), "ep 4": RoleSplit(ep=4)}
ADAPTED = ("alone", *EXPERTS)
RESUMED = {"alone": "tp 2, ep 4", "tp 2, ep 2": "alone"}
SHARED = list(SPLITS)[1:]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


class Roles(Runs):
    """Policies, critics and frozen models of one split after the other."""

    def __init__(self, world: World, folder: Path) -> None:
        self.splits, self.folder = Splits(world, SPLITS | EXPERTS), folder

    def frozen(self, split: str, folder: Path) -> list[str]:
        context = self.splits.context(split, 4)
        cfg = replace(FrozenConfig.like(CONFIG), wrap="auto")
        model = FrozenModel(cfg, context, str(folder))
        return in_order(context, model.score(with_returns(context, 5)))

    def critic(self, split: str, folder: Path) -> dict[str, Any]:
        """Values before and after steps, and what these say."""
        context = self.splits.context(split, 4)
        critic = ValueTrainer(CONFIG, context, str(folder))
        first = in_order(context, critic.values(with_returns(context, 5)))
        steps = [critic.train_step(with_returns(context, seed), squares) for seed in (0, 1, 2)]
        names = ("train/loss", "train/grad_norm")
        return {"first": first, "steps": [[one[name] for name in names] for one in steps]}


def adapted(runs: Roles, split: str, folder: Path) -> list[Any]:
    """What adapters of a mixture are after two steps, and what they compute."""
    lora = LoraConfig(rank=32, alpha=64)  # shards are multiples of 32 elements
    backend = Fsdp2Config(wrap="layer")
    trainer = runs.built(split, folder, lora=lora, deterministic=True, backend=backend)
    first = logprobs(trainer)
    train(trainer, [0, 1])
    whole = {name: trainer.backend.gather(name).detach() for name in trainer.backend.names()}
    bits = {name: np.asarray(one).tobytes().hex() for name, one in whole.items()}
    return [first, logprobs(trainer), digests(trainer), bits]


def on_rank(world: World, mixture: Path, qwen: Path, dense: Path, work: Path) -> Report:
    runs = Roles(world, mixture)
    report: Report = {
        name: {} for name in ("scores", "top", "alike", "frozen", "critic", "dense", "resumed")
    }
    for split in SPLITS:
        trainer = runs.built(split)
        report["scores"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        report["frozen"][split] = runs.frozen(split, mixture)
        values, report["alike"][split] = gradients(trainer)
        if world.rank == 0:
            save_file(values, work / f"{split}.safetensors")
    for split in DENSE:
        report["critic"][split] = runs.critic(split, dense)
        report["dense"][split] = runs.frozen(split, dense)
    report["critic of a mixture"] = [
        runs.critic(split, mixture) for split in ("alone", "tp 2, ep 4")
    ]
    for split in BALANCED:
        batch = replace(make_batch(0), advantages=np.zeros_like(make_batch(0).advantages))
        values, _ = gradients(runs.built(split, qwen, router_aux_loss_coef=0.5), batch)
        if world.rank == 0:
            save_file(values, work / f"balanced {split}.safetensors")
    report["adapted"] = {split: adapted(runs, split, qwen) for split in ADAPTED}
    for split, other in RESUMED.items():
        saved = runs.saved(split, work / f"saved {split}")
        report["resumed"][split] = saved, runs.resumed(other, work / f"saved {split}")
    backend = Fsdp2Config(recompute="all", wrap="layer")
    again, plain = (
        runs.built("tp 2, ep 2", deterministic=True, backend=one)
        for one in (backend, Fsdp2Config(wrap="layer"))
    )
    for one in (again, plain):
        train(one, [0])
    report["recomputed"] = digests(again) == digests(plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelPart, "own_rows", lambda part, size: slice(0, size // part.count))
        report["control"] = logprobs(runs.built("tp 2, ep 2"))
    return report


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("axes")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    mixture = with_sizes(write_glm_folder(work / "mixture"), intermediate_size=56, **HEADS)
    dense = with_sizes(write_model_folder(work / "dense"), intermediate_size=56, **HEADS)
    qwen = with_sizes(write_mixture_folder(work / "qwen"), **HEADS)
    return on_ranks(on_rank, 4, mixture, qwen, dense, work)[0]


def check_close(gradients: Path, expected: Path) -> None:
    found, whole = load_file(gradients), load_file(expected)
    assert found.keys() == whole.keys()
    for name, one in whole.items():
        error = (found[name].double() - one).norm()
        assert error <= 2e-5 * one.norm(), name
        assert one.norm() > 0 or "mlp.gate" not in name, name


@pytest.mark.parametrize("split", SHARED)
@pytest.mark.parametrize("what", ["scores", "top", "frozen"])
def test_a_mixture_has_the_bits_of_ranks_that_share_nothing(
    what: str, split: str, report: Report
) -> None:
    assert report[what][split] == report[what]["alone"]


def test_a_frozen_mixture_has_the_bits_of_a_trainer(report: Report) -> None:
    assert report["frozen"]["alone"] == report["scores"]["alone"]


def test_rows_of_another_rank_show(report: Report) -> None:
    assert report["control"] != report["scores"]["alone"]


@pytest.mark.parametrize("split", SHARED)
def test_gradients_of_a_mixture_are_those_of_ranks_that_share_nothing(
    split: str, work: Path, report: Report
) -> None:
    assert report["alike"][split]
    check_close(work / f"{split}.safetensors", work / "alone.safetensors")


@pytest.mark.parametrize("split", BALANCED[1:])
def test_the_loss_that_balances_experts_is_counted_once(
    split: str, work: Path, report: Report
) -> None:
    """All ranks have the same batch, in which nothing else has a gradient."""
    check_close(work / f"balanced {split}.safetensors", work / "balanced alone.safetensors")


@pytest.mark.parametrize("split", DENSE[1:])
def test_values_have_the_bits_of_ranks_that_share_nothing(split: str, report: Report) -> None:
    alone, shared = (report["critic"][name] for name in ("alone", split))
    assert shared["first"] == alone["first"]
    for step, expected in zip(shared["steps"], alone["steps"], strict=True):
        assert step == pytest.approx(expected, rel=2e-5)
    assert report["dense"][split] == report["dense"]["alone"]


def test_a_critic_may_be_a_mixture(report: Report) -> None:
    alone, shared = report["critic of a mixture"]
    assert shared["first"] == alone["first"]
    for step, expected in zip(shared["steps"], alone["steps"], strict=True):
        assert step == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("split", ADAPTED[1:])
def test_adapters_of_experts_learn_the_same_bits_on_any_number_of_ranks(
    split: str, number: int, report: Report
) -> None:
    """Log-probs before and after, weights and moments, and what is gathered."""
    first, last, _, whole = alone = report["adapted"]["alone"]
    assert report["adapted"][split][number] == alone[number]
    assert first != last
    assert any(".experts.7.down_proj.lora_B" in name for name in whole)


@pytest.mark.parametrize("split", RESUMED)
def test_a_checkpoint_goes_on_where_ranks_share_otherwise(split: str, report: Report) -> None:
    saved, resumed = report["resumed"][split]
    assert resumed == saved


def test_layers_that_are_computed_again_send_rows_again(report: Report) -> None:
    assert report["recomputed"]
