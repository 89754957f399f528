"""A refreshed reference and a critic are part of a run that resumes bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.train.frozen import UNCHANGED_FILE

pytestmark = [pytest.mark.dist, pytest.mark.system]

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"
RECIPE = str(Path(__file__).with_name("refreshed.py"))
WORDS = [
    f"--model={EXAMPLE / 'model'}",
    f"--data={EXAMPLE / 'train.jsonl'}",
    "--trainer.init=random",
    "--trainer.lr=1e-2",
    "--run.keep_checkpoints=9",
    "--run.resume=true",
]
OWN_RANKS = ["--split.train.ranks=1", "--split.infer.ranks=1", "--split.reference.ranks=1"]
SPLITS = {
    "one rank": (1, []),
    "two ranks": (2, []),
    "ranks of its own": (3, [*OWN_RANKS, "--split.critic.ranks=1-2"]),
}


def measured(ended: Any) -> list[dict[str, float]]:
    """What the steps logged, but for what depends on a clock."""
    names = ("test/", "train/", "sync/")
    return [
        {key: value for key, value in row.items() if key.startswith(names)} for row in ended.metrics
    ]


@pytest.mark.parametrize("split", SPLITS)
def test_a_resumed_run_has_the_same_bits(run: Any, split: str) -> None:
    nproc, words = SPLITS[split]
    whole = run(RECIPE, *WORDS, *words, name="whole", small=False, nproc=nproc)
    assert whole.code == 0, whole.sentence
    expected = measured(whole)
    assert [row["test/version"] for row in expected] == [-1, -1, 2, 2, 4]
    sums = [row["test/reference"] for row in expected]
    assert len(set(sums)) == 5
    assert expected[0]["test/critic"] > expected[-1]["test/critic"]
    for num_steps in (2, 4, 5):  # before the first refresh, after it, and to the end
        parts = run(
            RECIPE, *WORDS, *words, f"--steps={num_steps}", name="parts", small=False, nproc=nproc
        )
        assert parts.code == 0, parts.sentence
    assert measured(parts) == expected
    assert "bit for bit" not in parts.output
    files = [ended.folder / "critic/model.safetensors" for ended in (whole, parts)]
    assert files[0].read_bytes() == files[1].read_bytes()
    saved = parts.folder / "checkpoints"
    assert (saved / "step_000002/reference" / UNCHANGED_FILE).exists()
    assert not (saved / "step_000004/reference" / UNCHANGED_FILE).exists()


def test_a_lost_refresh_shows(run: Any) -> None:
    """Step 4 scores with what was pushed before step 3, and not with the first weights."""
    whole = run(RECIPE, *WORDS, "--steps=4", name="whole", small=False)
    run(RECIPE, *WORDS, "--steps=3", name="lost", small=False)
    reference = whole.folder.with_name("lost") / "checkpoints/step_000003/reference"
    shutil.rmtree(reference)
    reference.mkdir()
    (reference / UNCHANGED_FILE).touch()
    lost = run(RECIPE, *WORDS, "--steps=4", name="lost", small=False)
    assert lost.code == 0, lost.sentence
    assert measured(lost)[:3] == measured(whole)[:3]
    assert measured(lost)[3]["test/reference"] != measured(whole)[3]["test/reference"]
