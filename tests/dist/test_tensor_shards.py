"""Matrices over 1, 2 and 4 gloo ranks of FSDP2 (axis tp), and sequences over others (axis cp): the
same bits of log-probs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.attention import shared_tokens
from spmd_rl.kernels.linear import shard_exchange
from spmd_rl.kernels.linear.shard_exchange import TorchExchange
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.trainer import Trainer
from tests.dist.recipes.test_tensor_parallel import write_qwen2
from tests.dist.test_sequence_shards import in_wrong_order
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import make_batch, with_sizes, write_model_folder
from tests.dist.trainers import (
    Splits,
    check_gradients,
    check_scores,
    digests,
    gradients,
    logprobs,
    own_shard,
    top,
    train,
    train_on_all_scores,
)

pytestmark = pytest.mark.dist

Report = dict[str, Any]
BOTH = "tp 2, cp 2"
SPLITS = {
    "tp 1": RoleSplit(),
    "tp 2": RoleSplit(tp=2),
    "tp 4": RoleSplit(tp=4),
    "2 copies, tp 2": RoleSplit(dp=2, tp=2),
    BOTH: RoleSplit(tp=2, cp=2),
}
CONFIG = TrainerConfig(init="random", lr=1e-2, eps=1e-4, max_tokens=60)
ROW_SHARDS = 4
# the splits that save, and those that go on
RESUMED = {"tp 1": BOTH, "2 copies, tp 2": "tp 1", BOTH: "tp 4"}


def in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """A sum whose tree has another shape."""
    for part in parts[1:]:
        parts[0].add_(part)
    return parts[0]


def exchanged(group: dist.ProcessGroup) -> list[bool]:
    """Whether sums over four ranks, of few rows and of many, are those of numpy in the tree.

    A warning of torch, which every rank of a run would print, is an error.
    """
    exchange, found = TorchExchange(group), []
    for num_rows in (1, 3, 4, 6, 16):
        generator = torch.Generator().manual_seed(num_rows)
        a, b, c, d, bias = torch.randn(5, num_rows, 24, generator=generator).numpy()
        own = torch.from_numpy([a, b, c, d][group.rank()].copy())
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            total = exchange.sum(own, torch.from_numpy(bias[0]), torch.float32)
        found.append(np.array_equal(total.numpy(), ((a + b) + (c + d)) + bias[0]))
    return found


class Runs:
    """Trainers of a model on all ranks, one for each split of them."""

    def __init__(self, world: World, folder: Path) -> None:
        self.splits, self.folder = Splits(world, SPLITS), folder

    def built(
        self, split: str, folder: Path | None = None, row_shards: int = ROW_SHARDS, **settings: Any
    ) -> Trainer:
        context = self.splits.context(split, row_shards)
        return Trainer(replace(CONFIG, **settings), context, str(folder or self.folder))

    def saved(self, split: str, folder: Path) -> tuple[Any, ...]:
        """What a trainer is that has learned once, and saved that."""
        trainer = self.built(split)
        train(trainer, [0])
        trainer.save(str(folder))
        trainer.wait_until_saved()
        return digests(trainer), logprobs(trainer)

    def recomputed(self, split: str) -> dict[str, Any]:
        """What a trainer is that has learned once, for each choice of what is computed again."""
        found = {}
        for recompute in ("none", "cheap", "all"):
            backend = Fsdp2Config(recompute=recompute, wrap="layer")
            trainer = self.built(split, deterministic=True, backend=backend, logit_rows=16)
            train(trainer, [0])
            found[recompute] = digests(trainer)
        return found

    def of_one_token(self, split: str) -> list[Any]:
        """Log-probs of a batch with a single token to score, which one rank of those that share a
        sequence has, and the norm of its gradients.
        """
        trainer, batch = self.built(split), make_batch(5).select(range(4))
        mask = np.zeros_like(batch.mask)
        mask[np.flatnonzero(batch.mask)[0]] = True
        alone, context = replace(batch, mask=mask), trainer.context
        bits, shard = logprobs(trainer, alone), own_shard(context, alone)
        return [bits, trainer.train_step(shard, grpo_loss)["train/grad_norm"]]

    def resumed(self, split: str, folder: Path) -> tuple[Any, ...]:
        trainer = self.built(split, seed=7)
        trainer.load(str(folder))
        return digests(trainer), logprobs(trainer)


def on_rank(world: World, dense: Path, biased: Path, work: Path) -> Report:
    """1, 2 and 4 ranks share each matrix, also where two others share the tokens of sequences.
    Log-probs are told as bits.
    """
    runs = Runs(world, dense)
    names = ("dense", "biased", "top", "alike", "scores", "one token", "recomputed")
    report: Report = {name: {} for name in (*names, "saved", "resumed", "controls")}
    for split in SPLITS:
        trainer = runs.built(split)
        report["dense"][split] = logprobs(trainer)
        report["top"][split] = top(trainer)
        found, report["alike"][split] = gradients(trainer)
        if world.rank == 0:
            save_file(found, work / f"{split}.safetensors")
    group = runs.splits.context("tp 4").axis_group(("tp",))
    report["exchanged"] = exchanged(group)
    for split in ("tp 1", "tp 4", BOTH):
        report["biased"][split] = logprobs(runs.built(split, biased, init="folder"))
    for split in ("tp 1", "tp 2", BOTH):
        report["scores"][split] = train_on_all_scores(runs.built(split))
        report["one token"][split] = runs.of_one_token(split)
    for split in ("tp 2", BOTH):
        report["recomputed"][split] = runs.recomputed(split)
    for split, other in RESUMED.items():
        report["saved"][split] = runs.saved(split, work / split)
        report["resumed"][split] = runs.resumed(other, work / split)
    runs.built("tp 2").export_hf(str(work / "hf"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_exchange, "sum_neighbours", in_a_row)
        report["controls"]["in a row"] = logprobs(runs.built("tp 4"))
    report["controls"]["two parts"] = logprobs(runs.built(BOTH, row_shards=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_tokens, "_exchanged", in_wrong_order)
        report["controls"]["tokens in another order"] = logprobs(runs.built(BOTH))
    return report


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensors")


@pytest.fixture(scope="module")
def report(work: Path) -> Report:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    dense = with_sizes(write_model_folder(work / "dense"), intermediate_size=56, **heads)
    biased = write_qwen2(work / "biased", num_key_value_heads=4)
    return on_ranks(on_rank, 4, dense, biased, work)[0]


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_log_probs_have_the_bits_of_a_rank_with_whole_matrices(split: str, report: Report) -> None:
    assert report["dense"][split] == report["dense"]["tp 1"]


def test_sums_of_few_rows_and_of_many_have_one_tree(report: Report) -> None:
    assert report["exchanged"] == [True] * 5


@pytest.mark.parametrize("split", ["tp 4", BOTH])
def test_biases_and_a_tied_head_are_shared_too(split: str, report: Report) -> None:
    assert report["biased"][split] == report["biased"]["tp 1"]


@pytest.mark.parametrize("split", list(SPLITS)[1:])
def test_the_likeliest_tokens_are_the_same(split: str, report: Report) -> None:
    ids, _ = report["top"]["tp 1"]
    assert np.shape(ids) == (make_batch(5).num_tokens, 3)
    assert report["top"][split] == report["top"]["tp 1"]


@pytest.mark.parametrize("control", ["in a row", "two parts", "tokens in another order"])
def test_a_tree_of_another_shape_and_another_order_show(control: str, report: Report) -> None:
    assert report["controls"][control] != report["dense"]["tp 1"]


@pytest.mark.parametrize("split", list(SPLITS))
def test_gradients_are_those_of_transformers_in_float64(
    split: str, work: Path, report: Report
) -> None:
    check_gradients(work / "hf", work / f"{split}.safetensors")


@pytest.mark.parametrize("split", list(SPLITS))
def test_ranks_that_have_the_same_weights_have_the_same_gradients(
    split: str, report: Report
) -> None:
    assert report["alike"][split]


@pytest.mark.parametrize("split", ["tp 2", BOTH])
def test_entropies_and_candidates_have_gradients(split: str, report: Report) -> None:
    check_scores(report["scores"]["tp 1"], report["scores"][split])


@pytest.mark.parametrize("split", ["tp 2", BOTH])
def test_ranks_without_a_token_to_score_take_part(split: str, report: Report) -> None:
    (bits, norm), (expected, of_one) = (report["one token"][name] for name in (split, "tp 1"))
    assert bits == expected
    assert norm == pytest.approx(of_one, rel=2e-5)


@pytest.mark.parametrize("split", ["tp 2", BOTH])
@pytest.mark.parametrize("recompute", ["cheap", "all"])
def test_layers_that_are_computed_again_exchange_again(
    recompute: str, split: str, report: Report
) -> None:
    found = report["recomputed"][split]
    assert found[recompute] == found["none"]


@pytest.mark.parametrize("split", list(RESUMED))
def test_a_checkpoint_goes_on_with_other_parts(split: str, report: Report) -> None:
    assert report["resumed"][split] == report["saved"][split]
