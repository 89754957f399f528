"""Sequences over 1, 2 and 4 gloo ranks of FSDP2 (axis cp): the same bits of log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.kernels.attention import shared_tokens
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.train.training_role import TrainingRole
from spmd_rl.train.value_trainer import ValueTrainer
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import (
    make_batch,
    with_sizes,
    write_mixture_folder,
    write_model_folder,
)
from tests.dist.trainers import (
    Splits,
    check_gradients,
    check_scores,
    digests,
    gradients,
    logprobs,
    top,
    train,
    train_on_all_scores,
)

pytestmark = pytest.mark.dist

Report = dict[str, Any]
SPLITS = {
    "cp 1": RoleSplit(),
    "cp 2": RoleSplit(cp=2),
    "cp 4": RoleSplit(cp=4),
    "2 copies, cp 2": RoleSplit(dp=2, cp=2),
    "cp 2, ep 2": RoleSplit(cp=2, ep=2),
}
DENSE = ("cp 1", "cp 2", "cp 4", "2 copies, cp 2")
MIXTURE = ("cp 1", "cp 2", "cp 2, ep 2")
CONFIG = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=60)
LORA = LoraConfig(rank=4, alpha=8.0)


EXCHANGED = shared_tokens._exchanged


def values(trainer: ValueTrainer) -> list[str]:
    return [one.hex() for one in trainer.values(make_batch(5)).values.tolist()]


def in_wrong_order(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What other ranks have for this one, each in the place of its neighbour."""
    return EXCHANGED(x, group).roll(1, 0)


def _ones(trainer: TrainingRole) -> list[tuple[str, Tensor]]:
    """Adapters that change what the model computes."""
    return [
        (name, torch.full_like(trainer.backend.gather(name), 0.1))
        for name in trainer.backend.names()
        if name.endswith("lora_B.weight")
    ]


def on_rank(world: World, dense: Path, mixture: Path, work: Path) -> Report:
    """Log-probs are told as bits."""
    splits = Splits(world, SPLITS)

    def built(split: str, model: Path = dense, role: Any = Trainer, **settings: Any) -> Any:
        return role(replace(CONFIG, **settings), splits.context(split), str(model))

    report: Report = {name: {} for name in ("dense", "mixture", "lora", "coded", "value", "top")}
    for split in DENSE:
        trainer = built(split)
        report["dense"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        found, _ = gradients(trainer)
        if world.rank == 0:
            save_file(found, work / f"{split}.safetensors")
    report["scores"] = [train_on_all_scores(built(split)) for split in ("cp 1", "cp 2")]
    for recompute in ("none", "cheap", "all"):
        backend = Fsdp2Config(recompute=recompute, wrap="layer")
        trainer = built("cp 4", deterministic=True, backend=backend)
        train(trainer, [0])
        report[recompute] = digests(trainer)
    for split in MIXTURE:
        report["mixture"][split] = logprobs(built(split, mixture))
    for split in ("cp 1", "cp 2"):
        adapted = built(split, lora=LORA)
        adapted.backend.fill((name, ones) for name, ones in _ones(adapted))
        report["lora"][split] = logprobs(adapted)
        report["coded"][split] = logprobs(built(split, weights="e4m3", cache="e4m3"))
        report["value"][split] = values(built(split, role=ValueTrainer))
    saved = built("cp 2")
    saved.export_hf(str(work / "hf"))
    train(saved, [0])
    saved.save(str(work / "saved"))
    saved.wait_until_saved()
    report["saved"] = digests(saved), logprobs(saved)
    resumed = built("cp 1", seed=7)
    resumed.load(str(work / "saved"))
    report["resumed"] = digests(resumed), logprobs(resumed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tokens, "_exchanged", in_wrong_order)
        report["control"] = logprobs(built("cp 2"))
    return report


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequences")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    """Models have four heads of keys, and two queries for each."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    dense = with_sizes(write_model_folder(work / "dense"), **heads)
    mixture = with_sizes(write_mixture_folder(work / "mixture"), **heads)
    return on_ranks(on_rank, 4, dense, mixture, work)[0]


@pytest.mark.parametrize("split", DENSE[1:])
def test_log_probs_have_the_bits_of_a_rank_with_whole_sequences(split: str, report: Report) -> None:
    assert report["dense"][split] == report["dense"]["cp 1"]


@pytest.mark.parametrize("split", MIXTURE[1:])
def test_log_probs_of_mixtures_have_them_too(split: str, report: Report) -> None:
    assert report["mixture"][split] == report["mixture"]["cp 1"]


@pytest.mark.parametrize("what", ["lora", "coded", "value"])
def test_adapters_codes_and_values_have_the_same_bits(what: str, report: Report) -> None:
    assert report[what]["cp 2"] == report[what]["cp 1"]
    assert report[what]["cp 1"] != report["dense"]["cp 1"]


@pytest.mark.parametrize("split", DENSE[1:])
def test_the_likeliest_tokens_are_the_same(split: str, report: Report) -> None:
    ids, _ = report["top"]["cp 1"]
    assert np.shape(ids) == (make_batch(5).num_tokens, 3)
    assert report["top"][split] == report["top"]["cp 1"]


def test_tokens_in_another_order_show(report: Report) -> None:
    assert report["control"] != report["dense"]["cp 1"]


@pytest.mark.parametrize("split", DENSE)
def test_gradients_are_those_of_transformers_in_float64(
    split: str, work: Path, report: Report
) -> None:
    check_gradients(work / "hf", work / f"{split}.safetensors")


def test_entropies_and_candidates_have_gradients(report: Report) -> None:
    check_scores(*report["scores"])


@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_layers_that_are_computed_again_exchange_again(recompute: str, report: Report) -> None:
    assert report[recompute] == report["none"]


def test_a_checkpoint_goes_on_where_one_rank_has_whole_sequences(report: Report) -> None:
    assert report["resumed"] == report["saved"]
