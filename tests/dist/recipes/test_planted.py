"""A family that nobody else knows in a whole run: trained, pushed, generated with, exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from spmd_rl.model.read import read_spec
from tests.dist.recipes.conftest import EXAMPLE
from tests.planted import family

pytestmark = pytest.mark.dist

RECIPE = """
from spmd_rl.recipes.grpo import Config, main
from tests.planted.family import plant

plant()
"""


def test_a_planted_family_runs_bit_for_bit(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(EXAMPLE / "model", model)
    config = json.loads((model / "config.json").read_text())
    sizes = {"vocab_size": config["vocab_size"], "initializer_range": 0.05}
    (model / "config.json").write_text(json.dumps(config | family.CONFIG | sizes))
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    split = ("--split.train.ranks=1", "--split.infer.ranks=1", "--run.verify_every=1")
    ended = run(str(recipe), f"--model={model}", "--steps=3", *split, nproc=2)
    assert ended.code == 0, ended.sentence
    monkeypatch.setitem(family.FAMILIES, "planted_moe", family.PLANTED)
    shapes = read_spec(model).parameter_shapes()
    for row in ended.metrics:
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/compared_tokens"] > 0
        assert row["sync/verified_tensors"] == len(shapes)
    exported = load_file(ended.folder / "hf" / "model.safetensors")
    assert {name: tuple(one.shape) for name, one in exported.items()} == shapes
