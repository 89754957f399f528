"""The recipe that docs/recipes.md is made of: it runs on either split, and goes on where it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

EXAMPLES = Path(__file__).parents[3] / "examples"
TOUR = str(EXAMPLES / "own_recipe/tour.py")
TRAIN = EXAMPLES / "arithmetic/train.jsonl"
WORDS = [
    f"--data={TRAIN}@[:100]",
    f"--hard={TRAIN}@[100:]",
    f"--held_out={EXAMPLES / 'arithmetic/eval.jsonl'}@[:20]",
    f"--reward={TOUR}:reward",
    "--eval_every=2",
    "--distance_cost=0.1",
]


def prompts(ended: Any, step: int) -> list[int]:
    return [row["tokens"] for row in ended.samples(step)]


def check_tour(ended: Any) -> None:
    """Assert that the tour ended well, and that its metrics are what the page says."""
    assert ended.code == 0, ended.sentence
    assert [("held_out/reward" in row) for row in ended.metrics] == [True, False, True, False]
    for row in ended.metrics:
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["reward/mean"] == pytest.approx(row["reward/right"] + 0.1 * row["reward/ended"])
        assert 0 < row["rollout/kept"] <= 1
        assert row["train/weight"] == 1  # on policy
    distances = [row["ref/k1"] for row in ended.metrics]
    assert distances[0] == 0
    assert all(distances[1:])


def test_the_tour_runs_on_a_rank_for_each_role(run: Any) -> None:
    split = ("--split.train.ranks=1", "--split.infer.ranks=1")
    check_tour(run(TOUR, *WORDS, *split, "--steps=4", nproc=2, draws=True))


def test_the_tour_goes_on(run: Any) -> None:
    """From the checkpoint after two steps it draws and learns what it drew and learned before."""
    words = (TOUR, *WORDS, "--steps=4", "--run.save_every=2")
    whole = run(*words, nproc=2)
    check_tour(whole)
    drawn = [prompts(whole, step) for step in range(1, 5)]
    weights = (whole.folder / "hf/model.safetensors").read_bytes()
    for path in ("checkpoints/step_000004", "hf", "samples"):
        shutil.rmtree(whole.folder / path)
    parts = run(*words, nproc=2)
    assert parts.code == 0, parts.sentence
    assert "resuming at step 3 from " in parts.output
    assert [prompts(parts, step) for step in (3, 4)] == drawn[2:]
    assert (parts.folder / "hf/model.safetensors").read_bytes() == weights


def test_a_reward_without_a_difference_is_told_and_the_tokenizers_end_is_enough(
    run: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (EXAMPLES / "arithmetic/model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    (tmp_path / "flat.py").write_text("def flat(prompt, sample):\n    return 0.5\n")
    ended = run("grpo", f"--model={folder}", f"--reward={tmp_path / 'flat.py'}:flat", "--steps=4")
    assert ended.code == 0
    assert ended.sentence.startswith("in 3 steps, all samples of every prompt had the same reward")
    assert min(row["rollout/truncated"] for row in ended.metrics) < 1
