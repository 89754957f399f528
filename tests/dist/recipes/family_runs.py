"""Whole runs of a family beside other settings: no token has other bits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.dist.recipes.test_hybrids import grpo
from tests.system import kill_resume

# of each: how many ranks, and settings
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sharded over two ranks": (2, ()),
    "a rank for each role": (2, ("--split.train.ranks=1", "--split.infer.ranks=1")),
    "samples that go on": (2, tuple(kill_resume.ROUNDS)),
    "adapters": (2, ("--trainer.lora.rank=4",)),
    "codes of weights": (1, ("--trainer.weights=int4", "--engine.weights=int4")),
    "codes of keys": (1, ("--trainer.cache=e4m3", "--engine.cache=e4m3")),
    "recomputed where it is cheap": (1, ("--trainer.backend.recompute=cheap",)),
    "bfloat16": (1, ("--trainer.dtype=bfloat16", "--engine.dtype=bfloat16")),
    "few pages": (
        1,
        ("--engine.num_pages=24", "--engine.max_batch=16", "--engine.max_step_tokens=16"),
    ),
}


def unchanged_by_run(at: Path, folder: Path, nproc: int, words: tuple[str, ...]) -> set[str]:
    """Run three steps, all of whose tokens must have equal bits.

    Returns the tensors that the export has as they were in the folder; none for adapters.
    """
    ended = grpo(at, folder, *words, nproc=nproc)
    assert ended.code == 0, ended.sentence
    assert len(ended.metrics) == 3
    assert {row["onpolicy/mismatched_tokens"] for row in ended.metrics} == {0}
    if any("lora" in word for word in words):
        return set()
    stored, first = (load_file(one / "model.safetensors") for one in (ended.folder / "hf", folder))
    assert stored.keys() == first.keys()
    return {name for name, one in stored.items() if torch.equal(one, first[name])}
