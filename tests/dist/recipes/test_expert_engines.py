"""Engines that share experts, on real gloo ranks: the samples of one engine, whatever is asked for.

Each rank has requests of its own, and all take each step together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import EXAMPLE, Ended, Run, run_in
from tests.dist.recipes.mixtures import write_mixture
from tests.dist.recipes.test_loops import EVEN
from tests.dist.recipes.test_requests import LONG, PUSHES, REQUESTS, SHARED, drawn
from tests.dist.recipes.test_sleep import ALWAYS, NEVER, POISONED, check_same, check_sleep

pytestmark = pytest.mark.dist

SHARING = (*SHARED, "--split.infer.ep=2")
LATE = (
    "import asyncio, random\n"
    "async def late(prompt, sample):\n"
    "    await asyncio.sleep(random.random() * 0.2)\n"
    "    return float(len(set(sample.tokens.tolist())))\n"
)

EPISODES = """
import asyncio, random
import spmd_rl as rl

async def talk(ctx: rl.HookContext, prompt: rl.Prompt, engine: rl.EpisodeEngine) -> rl.Sample:
    transcript = rl.Transcript(prompt)
    for _ in range(3):
        turn = await engine.complete(transcript)
        await asyncio.sleep(random.random() * 0.1)
        transcript.observe(await engine.encode(str(len(turn.text))))
    return transcript.sample()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = write_mixture(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe")
    return f"--model={folder}", "--trainer.init=folder"


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward that takes a random time."""
    reward = tmp_path_factory.mktemp("reward") / "late.py"
    reward.write_text(LATE)
    return f"--reward={reward}:late"


@pytest.fixture(scope="module")
def plain(
    model: tuple[str, ...], late: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The samples of one call to one engine that has all experts."""
    folder = tmp_path_factory.mktemp("plain")
    found: dict[str, Any] = drawn(run_in(folder, REQUESTS, *model, *LONG, late))
    assert len(found) == 32
    return found


@pytest.mark.parametrize(
    ("order", "engines", "words"),
    [
        (0, 2, ()),
        (1, 2, ("--engine.num_pages=6",)),
        (2, 2, ("--engine.prefix_cache=false", "--engine.max_step_tokens=16")),
        (3, 4, ()),
    ],
)
def test_samples_are_those_of_one_engine(
    run: Run,
    model: tuple[str, ...],
    late: str,
    plain: dict[str, Any],
    order: int,
    engines: int,
    words: tuple[str, ...],
) -> None:
    """With aborts, answers that go on, few pages and little work; of four engines, two share."""
    asked = (*model, *LONG, late, f"--order={order}", *SHARING, *words)
    ended = run(REQUESTS, *asked, nproc=engines)
    assert drawn(ended) == plain
    assert ("0 answers were resumed" not in ended.output) or not order


def test_requests_go_on_under_pushed_weights(run: Run, model: tuple[str, ...]) -> None:
    """A push takes place between two steps of both engines."""
    split = ("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.ep=2")
    found = drawn(run(PUSHES, *model, *LONG, "--trainer.lr=0.01", *split, nproc=3))
    assert found["mixed_samples"] > 0
    assert found["decreasing_versions"] == 0
    assert found["unequal_tokens"] == 0
    assert found["compared_tokens"] > 100
    assert found["unequal_under_the_other_version"] > 0


def test_engines_sleep_and_wake_with_the_same_bits(run: Run, model: tuple[str, ...]) -> None:
    words = ("--steps=3", f"--reward={EVEN}", "--engine.num_pages=256", "--split.infer.ep=2")
    asleep = run(POISONED, *model, *words, ALWAYS, nproc=2, name="asleep")
    awake = run("grpo", *model, *words, NEVER, nproc=2, name="awake")
    check_same(asleep, awake, 3)
    check_sleep(asleep, awake)
    check_bits(asleep)


def test_evaluations_go_before_samples_that_run_ahead(run: Run, model: tuple[str, ...]) -> None:
    """Fully asynchronous: pushes, evaluations of a higher priority, and samples of any age."""
    split = ("--split.train.ranks=1", "--split.infer.ranks=2", "--split.infer.ep=2")
    words = ("--steps=4", f"--reward={EVEN}", "--engine.max_batch=4", "--sampling.max_tokens=12")
    evaluated = (f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:8]", "--eval.every=2")
    ended = run("grpo_fully_async", *model, *words, *split, *evaluated, nproc=3)
    check_bits(ended)


def test_episodes_that_wait_for_tools_have_the_same_bits(
    run: Run, model: tuple[str, ...], tmp_path: Path
) -> None:
    """Each turn of an episode comes when it likes, so that engines are idle in between."""
    (tmp_path / "episodes.py").write_text(EPISODES)
    words = ("--steps=2", f"--reward={EVEN}", f"--hooks.generate={tmp_path}/episodes.py:talk")
    asked = (*model, *words, "--split.train.ranks=0-0")
    alone = run("grpo", *asked, "--split.infer.ranks=0-0", nproc=1, name="alone")
    shared = run("grpo", *asked, "--split.infer.ep=2", nproc=2, name="shared")
    check_same(shared, alone, 2)
    check_bits(shared)


def test_sums_by_ranks_are_noticed(run: Run, model: tuple[str, ...]) -> None:
    """Negative control: a trainer that has all experts adds slots in their order."""
    recipe = str(Path(__file__).parent / "partial_sums.py")
    words = ("--steps=1", f"--reward={EVEN}", "--run.exact=false", "--split.train.ranks=0-0")
    ended = run(recipe, *model, *words, "--split.infer.ep=2", nproc=2)
    assert ended.code == 0, ended.sentence
    assert sum(row["onpolicy/mismatched_tokens"] for row in ended.metrics) > 0


def check_bits(ended: Ended) -> None:
    assert ended.code == 0, ended.sentence
    compared = [row for row in ended.metrics if "onpolicy/compared_tokens" in row]
    assert sum(row["onpolicy/compared_tokens"] for row in compared) > 0
    for row in compared:  # all tokens of another step were drawn by older weights
        assert row["onpolicy/mismatched_tokens"] == 0
        assert row["onpolicy/router_flips"] == 0
