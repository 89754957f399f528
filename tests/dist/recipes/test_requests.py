"""Requests on real gloo ranks: any order and number of engines, aborts, pushes between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

REQUESTS = str(Path(__file__).parent / "requests_recipe.py")
PUSHES = str(Path(__file__).parent / "push_recipe.py")
LONG = ("--sampling.max_tokens=40", "--sampling.ignore_eos=true")


def drawn(ended: Any) -> Any:
    assert ended.code == 0, ended.sentence
    return json.loads((ended.folder / "drawn.json").read_text())


@pytest.mark.parametrize(("order", "engines"), [(1, 1), (2, 2), (3, 2)])
def test_samples_are_the_same_however_they_are_asked_for(
    run: Any, order: int, engines: int
) -> None:
    """Tokens, log-probs and rewards, bit for bit; another seed draws others."""
    plain = drawn(run(REQUESTS, *LONG, name="plain"))
    split = ("--split.train.ranks=0-0", "--split.infer.ranks=all")
    mixed = run(REQUESTS, *LONG, f"--order={order}", *split, nproc=engines, name="mixed")
    assert drawn(mixed) == plain
    assert "0 answers were resumed" not in mixed.output
    assert len(plain) == 32
    other = run(REQUESTS, *LONG, "--order=1", "--run.seed=5", name="other")
    assert drawn(other) != plain


def test_requests_go_on_under_pushed_weights(run: Any) -> None:
    """Every token keeps the version that drew it, with the log-prob of exactly these weights."""
    split = ("--split.train.ranks=1", "--split.infer.ranks=1")
    ended = run(PUSHES, *LONG, "--trainer.lr=0.01", "--engine.max_batch=2", *split, nproc=2)
    found = drawn(ended)
    assert found["mixed_samples"] > 0
    assert found["decreasing_versions"] == 0
    assert found["unequal_tokens"] == 0
    assert found["compared_tokens"] > 100
    assert found["unequal_under_the_other_version"] > 0
