"""Keys and values in 8 bits in whole runs on real gloo ranks: no mismatched bit, alone and with
weights in 8 bits, beside a reference and after a resume.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.dist.recipes.test_coded_weights import CODES
from tests.dist.recipes.test_loops import DISJOINT, check_proof, drawn

pytestmark = pytest.mark.dist

CACHE = ("--trainer.cache=e4m3", "--engine.cache=e4m3")
# too few pages for all sequences, prompts in pieces, and no prefix that is computed once
TIGHT = (
    *("--engine.num_pages=16", "--engine.max_batch=32", "--engine.max_step_tokens=36"),
    "--engine.prefix_cache=false",
)


def test_any_way_to_the_cache_draws_the_same_tokens(run: Any) -> None:
    alone = run("grpo", *CACHE, "--steps=2", name="alone")
    tight = run("grpo", *CACHE, *TIGHT, "--steps=2", *DISJOINT, nproc=2, name="tight")
    adapted = run("grpo", *CACHE, "--trainer.lora.rank=2", "--steps=2", name="adapted")
    plain = run("grpo", "--steps=1", name="plain")
    for ended in (alone, tight, adapted):
        check_proof(ended, 2)
        assert all(row["engine/kv_clipped"] == 0 for row in ended.metrics)
    assert drawn(alone, 2) == drawn(tight, 2)
    assert drawn(alone, 1) == drawn(adapted, 1) != drawn(plain, 1)
    assert "engine/kv_clipped" not in plain.metrics[0]
    facts = json.loads((alone.folder / "contract.json").read_text())
    assert "scales 2^0 of keys" in facts["train->infer"][0]["facts"]["cache"]
    assert "cache of trainer and engine: e4m3 codes" in alone.output


def test_it_goes_on_to_the_same_bits_with_weights_and_a_reference(run: Any) -> None:
    words = (
        *("grpo", *CODES, *CACHE, "--kl.coef=0.1", "--steps=2"),
        *("--run.save_every=1", "--run.keep_checkpoints=9"),
    )
    whole = run(*words, name="whole")
    check_proof(whole, 2)
    folder = whole.folder.with_name("resumed")
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "hf")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('"whole"', '"resumed"'))
    shutil.rmtree(folder / "checkpoints/step_000002")
    resumed = run(*words, name="resumed")
    check_proof(resumed, 2)
    assert drawn(resumed, 2) == drawn(whole, 2)
    assert resumed.metrics[-1]["train/loss"] == whole.metrics[-1]["train/loss"]
    shared = run("grpo", *CODES, *CACHE, "--split.train.cp=2", "--steps=1", nproc=2, name="shared")
    check_proof(shared, 1)
    assert drawn(shared, 1) == drawn(whole, 1)


def test_an_engine_with_another_cache_is_refused(run: Any) -> None:
    ended = run("grpo", CACHE[0], "--steps=1")
    assert ended.code != 0
    assert "engine.cache = 'full'" in ended.sentence and "set both alike" in ended.sentence
