"""When a run evaluates, and what it asks the engine for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from spmd_rl.controller.controller import Controller
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.evaluation import evaluation
from spmd_rl.evaluation.config import EvalConfig, EvalSet
from spmd_rl.evaluation.evaluation import Evaluation
from spmd_rl.observe.metrics_log import MetricsLog, read_metrics
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.rollout import Rollout
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import FIRST_EVALUATED, Prompt
from spmd_rl.types.samples import Sample


class Letters:
    """A tokenizer with a token for each letter."""

    chat_template, context, eos_token_id = None, 100, 0
    config_eos_ids: tuple[int, ...] = (0,)
    convert_tokens_to_ids = get_added_vocab = lambda *_: {}

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        return {"input_ids": [[*map(ord, text)] for text in texts]}


@dataclass
class Run:
    """Stands in for controller, rollout, trainer and link, and notes what is asked of them."""

    run_folder: Path
    num_done: int = 0
    fails: bool = False
    done: list[str] = field(default_factory=list)
    asked: list[tuple[list[Prompt], SamplingConfig, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generate = SimpleNamespace(call=self._generate)

    @contextmanager
    def phase(self, name: str, awake: Any = None) -> Iterator[None]:
        self.done.append(name)
        yield

    def push(self, version: int, drain: bool) -> None:
        self.done.append(f"push {version}")

    def plan_evaluations(self, schedule: Any, sets: list[str]) -> None:
        self.done.append("planned")

    def record_evaluation(
        self, num_steps: int, metrics: Mapping[str, float], groups: Mapping[str, list[Group]]
    ) -> None:
        self.done.append(f"evaluated {num_steps}")
        with closing(MetricsLog(self.run_folder / "metrics.jsonl")) as log:
            log.write(num_steps, metrics)

    def _generate(
        self, prompts: list[Prompt], sampling: SamplingConfig, **words: Any
    ) -> list[Group]:
        self.asked.append((prompts, sampling, words))
        failed = [graded(prompts[0], 0.0).replace(status="failed")] if self.fails else []
        return [Group(prompt, [graded(prompt, 1.0)], failed) for prompt in prompts]


def graded(prompt: Prompt, reward: float) -> Sample:
    tokens = np.zeros(2, np.int32)
    floats = np.zeros(2, np.float32)
    return Sample(prompt.uid, 0, tokens, floats, tokens, "completed", reward=reward)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda _: Letters())
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(5)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines) + "\n")
    return Run(tmp_path)


def made(
    run: Run, num_steps: int = 4, grade: Any = None, bear: Any = None, **settings: Any
) -> Evaluation:
    data = str(run.run_folder / "test.jsonl")
    if "sets" not in settings:
        settings["data"] = data
    cfg = SimpleNamespace(
        eval=EvalConfig(**settings),
        sampling=SamplingConfig(num_samples=8, max_tokens=3),
        prompts=PromptConfig(seed=7),
        model="m",
    )
    return Evaluation(cast(Controller, run), cfg, cast(Rollout, run), num_steps, grade, bear=bear)


def test_failed_episodes_are_recorded_and_then_refused(run: Run) -> None:
    class TooManyError(Exception):
        pass

    def bear(groups: list[Group]) -> None:
        assert run.done[-1] == "evaluated 0"
        if any(group.failed for group in groups):
            raise TooManyError

    fine = made(run, bear=bear)
    fine.run(0)
    run.fails = True
    with pytest.raises(TooManyError):
        fine.run(0)
    made(run).run(0)


def loop(run: Run, found: Evaluation, start: int = 0, num_steps: int = 4) -> list[int]:
    """Take the steps of a recipe; return the steps after which there was an evaluation."""
    for index in range(start, num_steps):
        found.after(index)
    run.num_done = num_steps
    found.at_end(cast(Any, run), cast(Any, run))
    return [int(word.split()[1]) for word in run.done if word.startswith("evaluated")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 4]),
        ({"every": 1}, [0, 1, 2, 3, 4]),
        ({"every": 2, "before": False}, [2, 4]),
        ({"every": 2, "at_end": False}, [0, 2, 4]),
        ({"every": 3, "at_end": False, "before": False}, [3]),
        ({"at_end": False, "before": False}, []),
        ({"sets": {}, "every": 1}, []),
    ],
)
def test_when_it_evaluates(run: Run, settings: dict[str, Any], expected: list[int]) -> None:
    assert loop(run, made(run, **settings)) == expected
    assert ("push 4" in run.done) == (4 in expected), "the last weights are pushed first"


def test_a_run_that_ended_early_evaluates_the_weights_that_it_has(run: Run) -> None:
    assert loop(run, made(run, num_steps=9, every=2), num_steps=3) == [0, 2, 3]
    assert "push 3" in run.done


@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_neither_repeats_nor_misses_one(run: Run, stop: int) -> None:
    found = made(run, every=1)
    for index in range(stop):
        found.after(index)
    if stop:  # it was ended after the evaluation with which the last of its steps begins
        run.done.append("killed")
    assert sorted(loop(run, made(run, every=1), start=max(0, stop - 1))) == [0, 1, 2, 3, 4]
    rows = [row["step"] for row in read_metrics(run.run_folder / "metrics.jsonl")]
    assert rows == [0, 1, 2, 3, 4]


def test_the_draws_are_the_same_in_every_evaluation_and_not_those_of_training(run: Run) -> None:
    loop(run, made(run, every=2, seed=5, num_samples=3))
    (first, sampling, words), *others = run.asked
    assert [prompt.text for prompt in first] == [f"{n}+1=" for n in range(5)]
    assert [prompt.uid for prompt in first] == [FIRST_EVALUATED + n for n in range(5)]
    assert sampling == SamplingConfig(num_samples=3, max_tokens=3, replay_filters=False)
    assert words == {"seed": 5, "step": 0, "evaluation": True}
    for again, same, later in others:
        assert [prompt.uid for prompt in again] == [prompt.uid for prompt in first]
        assert same == sampling
        assert later["seed"] == 5
    assert [words["step"] for _, _, words in run.asked] == [0, 2, 4]


def test_prompts_are_graded_by_their_set(run: Run) -> None:
    data = str(run.run_folder / "test.jsonl")
    sets = {"a": EvalSet(data), "b": EvalSet(data, reward={"m:f": 2.0})}
    made(run, sets=sets).run(0)
    (own, _, _), (others, _, _) = run.asked
    assert {str(prompt.reward) for prompt in own} == {"{}"}
    assert {str(prompt.reward) for prompt in others} == {"{'m:f': 2.0}"}


def test_a_large_set_is_generated_in_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "SAMPLES_PER_CALL", 4)
    found = made(run, num_samples=2).run(0)
    assert [len(prompts) for prompts, _, _ in run.asked] == [2, 2, 1]
    assert found["test"]["reward"] == 1


def test_a_recipe_may_grade_the_samples_itself(run: Run) -> None:
    def half(groups: list[Group]) -> list[Group]:
        return [Group(group.prompt, [graded(group.prompt, 0.5)]) for group in groups]

    assert made(run, grade=half).run(0)["test"]["reward"] == 0.5
