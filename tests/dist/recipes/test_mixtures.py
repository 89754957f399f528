"""Recipes without rollouts on mixtures and large files: metrics by source, and an exact resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.dist.recipes.conftest import EXAMPLE
from tests.dist.recipes.test_data_recipes import KEEP_ALL, forget_after

pytestmark = pytest.mark.dist

SETTINGS = (
    f"--model={EXAMPLE / 'model'}",
    "--trainer.init=random",
    "--trainer.lr=1e-3",
    "--trainer.max_tokens=64",
    "--pairs_per_step=8",
    *KEEP_ALL,
)


def test_supervised_data_of_a_large_and_a_small_file(run: Any, tmp_path: Path) -> None:
    large = tmp_path / "large.jsonl"
    with large.open("w") as file:
        for number in range(100_001):
            record = {"prompt": f"{number % 100}+0=", "answer": str(number % 100)}
            file.write(json.dumps(record) + "\n")
    data = f'--data={{"{large}" = 3, "{EXAMPLE / "train.jsonl"}@[:50]" = 1}}'
    words = ("sft", *SETTINGS, data, "--steps=4")
    whole = run(*words, nproc=2, small=False, draws=True)
    assert whole.code == 0, whole.sentence
    weights = load_file(whole.folder / "hf/model.safetensors")
    for row in whole.metrics:
        shares = row["source/large/share"], row["source/train/share"]
        losses = row["source/large/loss"], row["source/train/loss"]
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        parts = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        assert parts == pytest.approx(row["train/loss"], abs=1e-4)

    assert forget_after(whole.folder, 2).is_dir()
    shutil.rmtree(whole.folder / "hf")
    assert run(*words, nproc=2, small=False).code == 0
    resumed = load_file(whole.folder / "hf/model.safetensors")
    assert all((resumed[name] == weights[name]).all() for name in weights)

    forget_after(whole.folder, 2)
    with large.open("a") as file:
        file.write('{"prompt": "1+0=", "answer": "1"}\n')
    refused = run(*words, nproc=2, small=False)
    assert refused.code != 0
    assert "the pairs are not those of the checkpoint" in refused.sentence


@pytest.mark.parametrize("recipe", ["dpo", "reward_model"])
def test_preference_pairs_of_two_files(run: Any, recipe: str) -> None:
    pairs = EXAMPLE / "pairs.jsonl"
    data = f'--data={{"{pairs}@[:40]" = 1, "{EXAMPLE / "eval_pairs.jsonl"}" = 1}}'
    held_out = f"--eval.data={EXAMPLE / 'eval_pairs.jsonl'}@[:10]"
    words = (recipe, *SETTINGS, data, held_out, "--steps=2")
    ended = run(*words, nproc=2, small=False, draws=True)
    assert ended.code == 0, ended.sentence
    family = "dpo" if recipe == "dpo" else recipe
    for row in (one for one in ended.metrics if "train/loss" in one):
        for key in ("accuracy", "margin"):
            parts = sum(
                row[f"source/{name}/share"] * row[f"source/{name}/{key}"]
                for name in ("pairs", "eval_pairs")
            )
            assert parts == pytest.approx(row[f"{family}/{key}"], abs=1e-4)
        assert row["source/pairs/share"] == pytest.approx(0.5)
