"""A batch in a fixed number of parts: the same bits of weights on 1, 2 and 4 gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spmd_rl.algo.losses import grpo_loss
from spmd_rl.mesh.split import RoleSplit
from spmd_rl.mesh.world import World
from spmd_rl.model.lora import LoraConfig
from spmd_rl.train.config import Fsdp2Config, OptimizerConfig, TrainerConfig
from spmd_rl.train.trainer import Trainer
from spmd_rl.types.batch import Batch
from tests.dist.torchrun import on_ranks
from tests.dist.train_case import make_batch, write_mixture_folder, write_model_folder
from tests.dist.trainers import Splits, digests

pytestmark = pytest.mark.dist

Report = dict[str, Any]
NUM_PARTS, STEPS = 4, 2
SPLITS = {
    "one": RoleSplit(ranks="0-0"),
    "two": RoleSplit(ranks="0-1"),
    "four": RoleSplit(),
    "two, cp 2": RoleSplit(cp=2),
    "one, cp 2": RoleSplit(ranks="0-1", cp=2),
    "two, tp 2": RoleSplit(tp=2),
    "one, tp 2": RoleSplit(ranks="0-1", tp=2),
    "four, ep 2": RoleSplit(ep=2),
}
CONFIG = TrainerConfig(
    init="random",
    lr=1e-2,
    eps=1e-4,
    weight_decay=0.1,
    max_tokens=120,
    minibatches=2,
    clip_norm=0.05,
    deterministic=True,
    data_parts=NUM_PARTS,
)
LAYERS = Fsdp2Config(wrap="layer")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "whole": (("one", "two", "four"), {}),
    "layers": (("one", "two", "four"), {"backend": LAYERS, "minibatches": 1}),
    "eight parts": (("one", "four"), {"data_parts": 8, "backend": LAYERS}),
    "adapters": (("one", "four"), {"lora": LoraConfig(rank=4)}),
    "muon": (("one", "four"), {"optimizer": OptimizerConfig(kind="muon")}),
    "sequences": (("one, cp 2", "two, cp 2"), {}),
    "matrices": (("one, tp 2", "two, tp 2"), {}),
    "layers of matrices": (("one, tp 2", "two, tp 2"), {"backend": LAYERS}),
    "mixture": (("one", "four, ep 2"), {"backend": LAYERS}),
    "off": (("one", "four"), {"data_parts": 0}),
}
FIXED = [case for case in CASES if case != "off"]
Deal = Callable[[Batch, int, int], Batch]


def in_turn(batch: Batch, ranks: int, rank: int) -> Batch:
    return batch.shard(ranks, NUM_PARTS)[rank]


def in_blocks(batch: Batch, ranks: int, rank: int) -> Batch:
    """A rank's share where it has neighbouring parts, whose sum comes first then."""
    shards = [in_turn(batch, NUM_PARTS, part) for part in range(NUM_PARTS)]
    own = shards[rank * NUM_PARTS // ranks : (rank + 1) * NUM_PARTS // ranks]
    index = [one for shard in own for one in shard.index.tolist()]
    sizes = tuple(shard.num_sequences for shard in own)
    return replace(batch.select(index), part_sizes=sizes if len(sizes) > 1 else ())


def train(trainer: Trainer, first: int, count: int, deal: Deal | None = None) -> list[str]:
    """Take some steps, and return the norms of their gradients as bits."""
    context, found = trainer.context, []
    for seed in range(first, first + count):
        batch, ranks, rank = make_batch(seed), context.data_size, context.data_rank
        own = batch.shard(ranks, trainer.cfg.data_parts)[rank]
        own = own if deal is None else deal(batch, ranks, rank)
        found.append(trainer.train_step(own, grpo_loss)["train/grad_norm"].hex())
    return found


def on_rank(world: World, dense: Path, mixture: Path, folder: Path) -> Report:
    """Trainers on 1, 2 and 4 of the ranks learn from the same batches, in 4 or 8 parts."""
    splits = Splits(world, SPLITS)

    def built(split: str, model: Path = dense, **settings: Any) -> Trainer:
        return Trainer(replace(CONFIG, **settings), splits.context(split), str(model))

    def learned(case: str, split: str) -> Any:
        trainer = built(split, mixture if case == "mixture" else dense, **CASES[case][1])
        return train(trainer, 0, STEPS), digests(trainer)

    def resumed(split: str) -> Any:
        trainer = built(split, seed=7)
        trainer.load(str(folder))
        norms = train(trainer, 1, STEPS - 1)
        return norms, digests(trainer), trainer.resume_differences()

    report: Report = {
        case: splits.each(lambda split, case=case: learned(case, split), names)
        for case, (names, _) in CASES.items()
    }
    if splits.has_part("two"):
        saved = built("two")
        train(saved, 0, 1)
        saved.save(str(folder))
        saved.wait_until_saved()
        report["blocks"] = train(built("two"), 0, STEPS, in_blocks)
    dist.barrier()
    return report | {"resumed": splits.each(resumed, ("one", "two", "four"))}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    work = tmp_path_factory.mktemp("parts")
    dense = write_model_folder(work / "dense")
    mixture = write_mixture_folder(work / "mixture")
    return on_ranks(on_rank, 4, dense, mixture, work / "saved")[0]


@pytest.mark.parametrize("case", FIXED)
def test_weights_and_norms_do_not_depend_on_the_ranks(case: str, report: Report) -> None:
    first, *others = (report[case][split] for split in CASES[case][0])
    for other in others:
        assert other == first


def test_norms_of_shared_matrices_are_those_of_whole_ones(report: Report) -> None:
    """A shard that several ranks have is counted once. The second step has other weights."""
    shared, whole = (
        float.fromhex(report[case][split][0][0])
        for case, split in (("matrices", "one, tp 2"), ("whole", "one"))
    )
    assert shared == pytest.approx(whole, rel=1e-4)


def test_without_fixed_parts_they_do(report: Report) -> None:
    norms = [tuple(report["off"][split][0]) for split in CASES["off"][0]]
    assert len(set(norms)) == len(norms)


def test_parts_that_are_dealt_out_in_blocks_show(report: Report) -> None:
    assert report["blocks"] != report["whole"]["two"][0]


@pytest.mark.parametrize("split", ["one", "two", "four"])
def test_a_checkpoint_goes_on_to_the_same_bits_on_other_ranks(split: str, report: Report) -> None:
    norms, state, differences = report["resumed"][split]
    expected = report["whole"]["four"]
    assert norms == expected[0][1:]
    assert state == expected[1]
    assert differences == []
