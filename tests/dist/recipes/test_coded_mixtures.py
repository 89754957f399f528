"""Mixtures with weights in few bits in whole runs on real gloo ranks: on every split no mismatched
bit and no other expert, the same tokens, and the same command goes on to the same bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.model.formats.coded_weights import coded_shapes
from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import Ended, run_in
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.recipes.test_coded_weights import CODES, CODES_OF_4_BITS
from tests.dist.recipes.test_loops import EVEN, check_proof, drawn

pytestmark = pytest.mark.dist

# two of four trainers share experts, and two of four engines; two engines of one trainer do
SPLITS = {
    "qwen3_moe": (4, ("--split.train.ep=2", "--split.infer.ep=2")),
    "glm4_moe": (3, ("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.ep=2")),
}


def write_wide(folder: Path, family: str) -> Path:
    """Write a mixture whose experts have several blocks, of which the last are smaller."""
    sizes = {"moe_intermediate_size": 136, "num_hidden_layers": 2}
    return write_mixture(folder, family, sizes)


def coded_run(
    folder: Path,
    model: Path,
    *words: str,
    nproc: int = 1,
    name: str = "r",
    codes: tuple[str, ...] = CODES,
) -> Ended:
    settings = (f"--model={model}", "--trainer.init=folder", f"--reward={EVEN}")
    proof = ("--run.verify_every=1", "--steps=3")
    return run_in(folder, "grpo", *settings, *proof, *codes, *words, nproc=nproc, name=name)


def check_codes(ended: Ended, model: Path) -> None:
    """Check that bits and experts are equal, and that codes and scales were compared."""
    check_proof(ended, 3)
    spec = read_spec(model)
    num_tensors = len(spec.parameter_shapes()) + len(coded_shapes(spec, "e4m3"))
    for row in ended.metrics:
        assert row["onpolicy/router_flips"] == 0
        assert row["sync/verified_tensors"] + row["sync/shared_tensors"] >= num_tensors


@pytest.mark.parametrize("family", SPLITS)
def test_every_split_draws_the_same_tokens(tmp_path: Path, family: str) -> None:
    model = write_wide(tmp_path / "model", family)
    runs = [
        coded_run(tmp_path, model, *words, nproc=nproc, name=f"r{number}")
        for number, (nproc, words) in enumerate([(1, ()), SPLITS[family]])
    ]
    for ended in runs:
        check_codes(ended, model)
    alone, *others = (drawn(ended, 1) for ended in runs)
    assert all(one == alone for one in others)


def test_the_same_command_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    model = write_wide(tmp_path / "model", "qwen3_moe")
    words = ("--split.train.ep=2", "--run.save_every=1", "--run.keep_checkpoints=9")
    whole = coded_run(tmp_path, model, *words, nproc=2, name="whole")
    folder = whole.folder.with_name("resumed")
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "hf")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('"whole"', '"resumed"'))
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    resumed = coded_run(tmp_path, model, *words, nproc=2, name="resumed")
    for ended in (whole, resumed):
        check_codes(ended, model)
    assert drawn(resumed, 3) == drawn(whole, 3)
    assert resumed.metrics[-1]["train/loss"] == whole.metrics[-1]["train/loss"]
    facts = json.loads((whole.folder / "contract.json").read_text())
    assert "routers" in facts["train->infer"][0]["facts"]["weights"]


def test_codes_of_4_bits_go_to_ranks_that_share_experts(tmp_path: Path) -> None:
    model = write_wide(tmp_path / "model", "qwen3_moe")
    split = ("--split.train.ep=2", "--split.infer.ep=2")
    ended = coded_run(tmp_path, model, *split, nproc=2, codes=CODES_OF_4_BITS)
    check_codes(ended, model)
