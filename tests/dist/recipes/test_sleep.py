"""Roles that sleep in turn on real gloo ranks: the bits are those of a run in which none sleeps.

Memory that sleeps holds no numbers there, so that a use of it would be seen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import EXAMPLE, SMALL, Ended, run_in
from tests.dist.recipes.test_loops import DISJOINT, EVEN, check_proof, drawn

pytestmark = pytest.mark.dist

POISONED = "tests.dist.recipes.poisoned_sleep"
STEPS = ("--steps=3", "--run.save_every=1", f"--reward={EVEN}", "--engine.num_pages=256")
ALWAYS, NEVER = "--offload.sleep=always", "--offload.sleep=never"


def exported(ended: Any) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in Path(ended.folder / "hf").glob("*.safetensors")
    }


def same_run(run: Any, recipe: str, *words: str, nproc: int = 1, steps: int = 3) -> tuple[Any, Any]:
    """Run a recipe with sleep and without, and see that samples and weights have the same bits."""
    words = (f"--steps={steps}", *words)
    small = recipe == "grpo"
    words += (f"--reward={EVEN}",) if small else ()
    asleep = run(recipe, *words, ALWAYS, nproc=nproc, name="asleep", small=small)
    awake = run(recipe, *words, NEVER, nproc=nproc, name="awake", small=small)
    check_same(asleep, awake, steps)
    return asleep, awake


def check_same(one: Ended, other: Ended, steps: int) -> None:
    assert one.code == other.code == 0, (one.sentence, other.sentence)
    assert drawn(one, steps) == drawn(other, steps)
    assert exported(one) == exported(other) != {}


@pytest.fixture(scope="module")
def awake_on_two(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """GRPO in which none sleeps."""
    return run_in(tmp_path_factory.mktemp("awake"), "grpo", *STEPS, NEVER, nproc=2)


def test_grpo_that_sleeps_on_two_ranks_has_the_same_weights(run: Any, awake_on_two: Ended) -> None:
    asleep = run("grpo", *STEPS, ALWAYS, nproc=2)
    check_same(asleep, awake_on_two, 3)
    check_sleep(asleep, awake_on_two)


def check_sleep(asleep: Ended, awake: Ended) -> None:
    """Assert that roles slept in the one run, and not in the other."""
    check_proof(asleep, 3)
    assert "roles sleep in turn: offload.sleep = always" in asleep.output
    assert "nothing sleeps: offload.sleep = never" in awake.output
    assert all(row["time/sleep"] > 0 and row["time/wake"] > 0 for row in asleep.metrics)
    assert not any("time/sleep" in row for row in awake.metrics)


def test_reference_critic_and_evaluation_take_their_turns(run: Any) -> None:
    words = ("--algorithm=ppo", "--kl.coef=0.01", "--critic.init=random", "--eval.every=1")
    words += (f"--eval.data={EXAMPLE / 'eval.jsonl'}@[:8]", "--run.save_every=1")
    asleep, awake = same_run(run, "grpo", *words, nproc=2)
    for name in ("eval/reward", "onpolicy/mismatched_tokens", "critic/loss", "train/kl"):
        values = [[row[name] for row in one.metrics if name in row] for one in (asleep, awake)]
        assert values[0] == values[1] != []
        assert name != "onpolicy/mismatched_tokens" or values[0] == [0, 0, 0]


def test_a_teacher_sleeps_while_its_student_answers(run: Any) -> None:
    words = [word for word in SMALL if not word.startswith("--reward")]
    words += [f"--teacher={EXAMPLE / 'model'}", "--frozen.init=random", "--frozen.seed=1"]
    same_run(run, "distill", *words, nproc=2)


def test_roles_without_company_never_sleep(run: Any) -> None:
    asleep, _ = same_run(run, "grpo", *DISJOINT, nproc=2)
    check_proof(asleep, 3)
    assert not any("time/sleep" in row for row in asleep.metrics)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run whose slabs are poisoned in sleep, and whose GPU never is full."""
    ended = run_in(tmp_path_factory.mktemp("whole"), POISONED, *STEPS, ALWAYS, nproc=2)
    assert ended.code == 0, ended.sentence
    return ended


def test_nothing_reads_memory_that_sleeps(whole: Ended, awake_on_two: Ended) -> None:
    check_same(whole, awake_on_two, 3)


def test_a_full_gpu_in_between_is_named_and_the_run_goes_on_exactly(whole: Any, run: Any) -> None:
    """tests/system/test_rank_kills.py kills ranks there."""
    words = (POISONED, *STEPS, ALWAYS, "--full=true")
    ended = run(*words, nproc=2)
    assert ended.code != 0
    assert "no room for pages of keys and values: 9 GiB are asked for" in ended.sentence
    again = run(*words, nproc=2)
    assert again.code == 0, again.sentence
    assert "resuming at step" in again.output
    assert drawn(again, 3) == drawn(whole, 3)
    assert exported(again) == exported(whole) != {}


@pytest.mark.parametrize(
    ("misuse", "sentence"),
    [
        ("export", r"export_hf needs memory 'master' of train, which sleeps.*\(sync, train\)"),
        (
            "generate",
            r"no weights of a known version.*slept after a push, push again",
        ),
        ("push", r"a push needs memory 'master' of train, which sleeps.*\(sync, train\)"),
    ],
)
def test_memory_that_sleeps_is_refused_by_name(run: Any, misuse: str, sentence: str) -> None:
    ended = run(POISONED, ALWAYS, "--steps=1", f"--misuse={misuse}")
    assert ended.code != 0
    assert re.search(sentence, ended.sentence), ended.sentence
