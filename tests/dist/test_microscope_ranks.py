"""`spmd-rl mismatch` of a run whose ranks share work: planted faults of exchanges are named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from tests.dist.launched import Launched, spmd_rl
from tests.dist.recipes.conftest import EXAMPLE, REPO
from tests.dist.recipes.mixtures import write_mixture

pytestmark = pytest.mark.dist

SAMPLE = {"prompt_uid": 7, "prompt": "15+29=", "prompt_tokens": [19, 23, 13, 20, 27, 31]}


def write_run(folder: Path, split: str, mixture: bool = False) -> Path:
    """Write the folder of a run with these axes of its trainer or engine."""
    hf = folder / "hf"
    if mixture:
        write_mixture(hf, "qwen3_moe")
    else:
        shutil.copytree(EXAMPLE / "model", folder / "like")
        config = json.loads((folder / "like" / "config.json").read_text())
        config["num_key_value_heads"] = config["num_attention_heads"]
        (folder / "like" / "config.json").write_text(json.dumps(config))
        save_folder(hf, folder / "like", random_weights(read_spec(folder / "like"), seed=1))
    role, _, sizes = split.partition(" ")
    (folder / "config.toml").write_text(f"[split.{role}]\n" + sizes.replace(", ", "\n") + "\n")
    (folder / "samples").mkdir()
    rows = [SAMPLE | {"index": n, "tokens": [22, 20 + n, 21, 1]} for n in range(2)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "samples" / "step_00001.jsonl").write_text(text)
    return folder


def mismatch(run: Path, main: Callable[[list[str]], int] = spmd_rl) -> tuple[int, str]:
    """Return the exit code of the command, and what it said."""
    paths = {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "TMPDIR": str(run)}
    process = Launched(["mismatch", str(run)], run, os.environ | paths, main)
    try:
        said = "".join(process.communicate(timeout=600))
    finally:
        process.end()
    assert process.returncode is not None
    return process.returncode, said


AGREEING = {
    "infer tp = 2": "engine and engine on 2 ranks",
    "train tp = 2, cp = 2": "trainer and trainer on 4 ranks",
}


@pytest.mark.parametrize("split", AGREEING)
def test_ranks_that_share_a_model_have_the_bits_of_one(tmp_path: Path, split: str) -> None:
    code, said = mismatch(write_run(tmp_path, split))
    assert code == 0, said
    assert f"{AGREEING[split]} agree in every bit" in said
    assert "Not looked at" not in said


@pytest.mark.parametrize("role", ["train", "infer"])
def test_ranks_that_share_experts_have_the_bits_of_one(tmp_path: Path, role: str) -> None:
    code, said = mismatch(write_run(tmp_path, f"{role} ep = 2", mixture=True))
    assert code == 0, said
    assert "on 2 ranks agree in every bit" in said


def is_rank(number: int) -> bool:
    return os.environ.get("RANK") == str(number)


def adds_in_a_row(words: list[str]) -> int:
    from spmd_rl.kernels.linear import shard_exchange

    shard_exchange.sum_neighbours = lambda parts: sum(parts[1:], parts[0].clone())
    return spmd_rl(words)


def leaves_out_a_part(words: list[str]) -> int:
    from spmd_rl.kernels.linear import shard_exchange

    shard_exchange.sum_neighbours = lambda parts: parts[0].clone()
    return spmd_rl(words)


def swaps_tokens(words: list[str]) -> int:
    from spmd_rl.kernels.attention import shared_tokens

    exchanged = shared_tokens._exchanged
    shared_tokens._exchanged = lambda x, group: exchanged(x, group).roll(1, 0)
    return spmd_rl(words)


def drops_a_row(words: list[str]) -> int:
    from spmd_rl.kernels.moe.dispatcher import EpDispatcher

    combine = EpDispatcher.combine

    def dropping(self: EpDispatcher, y: Tensor, dispatched: Any) -> Tensor:
        if is_rank(1):
            y = y.clone()
            y[:1] = 0
        return combine(self, y, dispatched)

    EpDispatcher.combine = dropping  # type: ignore[method-assign]
    return spmd_rl(words)


def has_experts_of_another(words: list[str]) -> int:
    from spmd_rl.model.layers.split_experts import SplitExperts

    layers = SplitExperts._layers

    def turned(self: SplitExperts, name: str) -> list[Any]:
        own = layers(self, name)
        return own[1:] + own[:1] if is_rank(1) else own

    SplitExperts._layers = turned  # type: ignore[method-assign]
    return spmd_rl(words)


def keeps_an_old_shard(words: list[str]) -> int:
    from spmd_rl.train.fsdp2 import sharded_model

    fill = sharded_model.ShardedModel.fill

    def stale(self: Any, weights: Any) -> None:
        fill(self, weights)
        if is_rank(1):
            with torch.no_grad():
                self.local["model.layers.1.mlp.up_proj.weight"].mul_(0.99)

    sharded_model.ShardedModel.fill = stale  # type: ignore[method-assign]
    return spmd_rl(words)


# what a fault is planted in, and the words that name it
FAULTS = {
    adds_in_a_row: ("train tp = 4", "layer 0 o_proj: "),
    leaves_out_a_part: ("infer tp = 2", "layer 0 o_proj: ", "the sum of 2 parts without part 2"),
    swaps_tokens: ("train cp = 2", "layer 0 attention: "),
    drops_a_row: ("infer ep = 2", "layer 0 experts: "),
    has_experts_of_another: ("train ep = 2", "layer 0 experts: "),
    keeps_an_old_shard: ("train tp = 2", "layer 1 up_proj: ", "only these have what differs: 1."),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_an_exchange_is_named(tmp_path: Path, fault: Callable[..., int]) -> None:
    split, *named = FAULTS[fault]
    code, said = mismatch(write_run(tmp_path, split, mixture="ep" in split), fault)
    assert code == 1, said
    assert said.startswith(named[0]), said
    assert all(words in said for words in named), said
    assert "engine and trainer agree in every bit" in said, "one rank sees nothing"
