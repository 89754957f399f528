"""Requests on real gloo ranks: any order and number of engines, aborts, pushes between steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import run_in

pytestmark = pytest.mark.dist

REQUESTS = str(Path(__file__).parent / "requests_recipe.py")
PUSHES = str(Path(__file__).parent / "push_recipe.py")
LONG = ("--sampling.max_tokens=24", "--sampling.ignore_eos=true", "--engine.max_batch=4")
SHARED = ("--split.train.ranks=0-0", "--split.infer.ranks=all")


def drawn(ended: Any) -> Any:
    assert ended.code == 0, ended.sentence
    return json.loads((ended.folder / "drawn.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The samples of one call to one engine."""
    return drawn(run_in(tmp_path_factory.mktemp("plain"), REQUESTS, *LONG))


@pytest.mark.parametrize(("order", "engines"), [(1, 1), (2, 2), (3, 2)])
def test_samples_are_the_same_however_they_are_asked_for(
    run: Any, plain: Any, order: int, engines: int
) -> None:
    """Tokens, log-probs and rewards, bit for bit."""
    mixed = run(REQUESTS, *LONG, f"--order={order}", *SHARED, nproc=engines)
    assert drawn(mixed) == plain
    assert "0 answers were resumed" not in mixed.output
    assert len(plain) == 32


def test_another_seed_draws_others(run: Any, plain: Any) -> None:
    assert drawn(run(REQUESTS, *LONG, "--order=1", "--run.seed=5")) != plain


@pytest.fixture(scope="module")
def late_words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Settings of two ranks that share an engine, with a reward that takes a random time."""
    reward = tmp_path_factory.mktemp("reward") / "late.py"
    reward.write_text(
        "import asyncio, random\n"
        "async def late(prompt, sample):\n"
        "    await asyncio.sleep(random.random() * 0.2)\n"
        "    return float(len(set(sample.tokens.tolist())))\n"
    )
    return (*LONG, f"--reward={reward}:late", *SHARED, "--split.infer.tp=2")


@pytest.fixture(scope="module")
def plain_late(late_words: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return drawn(run_in(tmp_path_factory.mktemp("late"), REQUESTS, *late_words, nproc=2))


@pytest.mark.parametrize("order", [4, 5])
def test_ranks_that_share_an_engine_have_the_same_requests(
    run: Any, order: int, late_words: tuple[str, ...], plain_late: Any
) -> None:
    """With aborts and answers that go on, although only the first rank hears of the rewards."""
    shard = run(REQUESTS, *late_words, f"--order={order}", nproc=2)
    assert drawn(shard) == plain_late
    assert "0 answers were resumed" not in shard.output


def test_requests_go_on_under_pushed_weights(run: Any) -> None:
    """Every token keeps the version that drew it, with the log-prob of exactly these weights."""
    split = ("--split.train.ranks=1", "--split.infer.ranks=1")
    ended = run(PUSHES, *LONG, "--trainer.lr=0.01", *split, nproc=2)
    found = drawn(ended)
    assert found["mixed_samples"] > 0
    assert found["decreasing_versions"] == 0
    assert found["unequal_tokens"] == 0
    assert found["compared_tokens"] > 100
    assert found["unequal_under_the_other_version"] > 0
