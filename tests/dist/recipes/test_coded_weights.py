"""Weights in 8 bits in whole runs on real gloo ranks: no mismatched bit, any number of shards, a
resume to the same bits, and the reference of a KL term.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.dist.recipes.test_loops import DISJOINT, check_proof, drawn

pytestmark = pytest.mark.dist

CODES = ("--trainer.weights=e4m3", "--engine.weights=e4m3")


def test_any_shards_draw_the_same_tokens(run: Any) -> None:
    """Two shards sum gradients in another order, so their first step alone has equal bits."""
    alone = run("grpo", *CODES, "--steps=3", name="alone")
    apart = run("grpo", *CODES, "--steps=3", *DISJOINT, nproc=2, name="apart")
    sharded = run("grpo", *CODES, "--steps=2", nproc=2, name="sharded")
    plain = run("grpo", "--steps=1", name="plain")
    for ended, steps in (alone, 3), (apart, 3), (sharded, 2):
        check_proof(ended, steps)
    assert drawn(alone, 3) == drawn(apart, 3)
    assert drawn(alone, 1) == drawn(sharded, 1) != drawn(plain, 1)
    facts = json.loads((alone.folder / "contract.json").read_text())
    assert facts["train->infer"][0]["facts"]["weights"].startswith("e4m3")
    assert "e4m3 codes" in alone.output


def test_it_goes_on_to_the_same_bits_beside_a_reference(run: Any) -> None:
    words = (
        "grpo",
        *CODES,
        "--kl.coef=0.1",
        "--steps=3",
        "--run.save_every=1",
        "--run.keep_checkpoints=9",
    )
    whole = run(*words, name="whole")
    check_proof(whole, 3)
    folder = whole.folder.with_name("resumed")
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "hf")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('"whole"', '"resumed"'))
    for step in (2, 3):
        shutil.rmtree(folder / f"checkpoints/step_{step:06d}")
    resumed = run(*words, name="resumed")
    check_proof(resumed, 3)
    assert drawn(resumed, 3) == drawn(whole, 3)
    assert resumed.metrics[-1]["train/loss"] == whole.metrics[-1]["train/loss"]


def test_an_engine_with_other_weights_is_refused(run: Any) -> None:
    ended = run("grpo", CODES[0], "--steps=1")
    assert ended.code != 0
    assert "set both alike" in ended.sentence
