"""Weights in few bits in whole runs on real gloo ranks: no mismatched bit, any number of shards, a
resume to the same bits, and the reference of a KL term.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.mixtures import write_mixture
from tests.dist.recipes.test_loops import DISJOINT, EVEN, check_proof, drawn

pytestmark = pytest.mark.dist

CODES = ("--trainer.weights=e4m3", "--engine.weights=e4m3")
CODES_OF_4_BITS = ("--trainer.weights=int4", "--engine.weights=int4")


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


@pytest.mark.parametrize("codes", [CODES, CODES_OF_4_BITS])
def test_it_goes_on_to_the_same_bits_beside_a_reference(run: Any, codes: tuple[str, ...]) -> None:
    words = (
        "grpo",
        *codes,
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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_adapters_learn_beside_a_base_in_8_bits(run: Any, tmp_path: Path, family: str) -> None:
    """A push brings adapters alone, and both sides have the same base."""
    model = [] if family == "qwen3" else [f"--model={write_mixture(tmp_path / 'm', family)}"]
    words = (
        f"--reward={EVEN}",
        "--trainer.lora.rank=4",
        "--trainer.lr=1e-2",
        "--kl.coef=0.1",
        *model,
    )
    ended = run("grpo", *CODES, *words, "--steps=3", nproc=2, name="coded")
    check_proof(ended, 3)
    facts = json.loads((ended.folder / "contract.json").read_text())["train->infer"][0]["facts"]
    assert facts["weights"].startswith("e4m3") and facts["base_weights"]
    assert ended.metrics[2]["train/kl"] > 0


def test_an_engine_with_other_weights_is_refused(run: Any) -> None:
    ended = run("grpo", CODES[0], "--steps=1")
    assert ended.code != 0
    assert "set both alike" in ended.sentence
