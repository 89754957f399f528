"""The model and the runs that the tests of backends share."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.dist.recipes.conftest import EXAMPLE, Run, run_in


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a recipe to its end in a folder of the test, with no settings but those given."""
    return partial(run_in, tmp_path, small=False)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the arithmetic example with two layers, and a head of its own."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(EXAMPLE / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "intermediate_size": 128, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
