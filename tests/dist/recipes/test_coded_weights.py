"""Weights and caches in few bits in whole runs: beside adapters, and where the two sides differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.mixtures import write_mixture
from tests.dist.recipes.test_features import CACHE, CODES
from tests.dist.recipes.test_loops import EVEN, check_proof

pytestmark = pytest.mark.dist


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


@pytest.mark.parametrize(
    ("setting", "sentence"), [(CODES[0], ""), (CACHE[0], "engine.cache = 'full'")]
)
def test_an_engine_that_computes_with_others_is_refused(
    run: Any, setting: str, sentence: str
) -> None:
    ended = run("grpo", setting, "--steps=1")
    assert ended.code != 0
    assert sentence in ended.sentence and "set both alike" in ended.sentence
