"""The best checkpoint and the early end of a run, by what its evaluations found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.checkpoints import Checkpoints, CheckpointState
from spmd_rl.controller.run.command import rewind
from spmd_rl.controller.run.evaluations import Evaluations, best_of_run
from spmd_rl.controller.run.step_loop import StepLoop
from spmd_rl.errors import ConfigError
from spmd_rl.observe.metrics_log import MetricsLog, drop_steps_after, read_metrics

REWARD = "eval/test/reward"
NUM_STEPS = 9


class Cursor:
    """A part of checkpoints."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


class Observer:
    """Writes what the recorder of a run writes, and notes why the run ended early."""

    def __init__(self, file: Path) -> None:
        self.file, self.sentences = file, list[str]()

    def on_steps(self, start: int, num_steps: int) -> None:
        drop_steps_after(self.file, start)

    def on_step(self, step: Any) -> None:
        self._write(step.index + 1, {"train/loss": 1.0})

    def on_evaluation(self, num_steps: int, metrics: Mapping[str, float], groups: Any) -> None:
        self._write(num_steps, metrics)

    def on_early_end(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def catch_up(self) -> None: ...

    def on_phase(self, name: str, seconds: float | None) -> None: ...

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        with closing(MetricsLog(self.file)) as log:
            log.write(step, metrics)


class Killed(Exception): ...


class Started:
    """One start of a run that evaluates before each step whose number is a multiple of `every`.

    `scores` are those of the weights by the number of their steps.
    """

    def __init__(self, folder: Path, scores: list[float], every: int = 1, **run: Any) -> None:
        self.scores, self.every = scores, every
        self.taken: list[int] = []
        self.path = folder / "r"
        self.observer = Observer(self.path / "metrics.jsonl")
        settings = {"best": REWARD, "save_every": 0, "keep_checkpoints": 1} | run
        self.path.mkdir(exist_ok=True)
        (self.path / "config.toml").write_text(f"[run]\nbest = {json.dumps(settings['best'])}\n")
        dispatcher: Any = SimpleNamespace(
            final_message=SimpleNamespace(),
            calls=SimpleNamespace(waited_s=0.0),
            termination=SimpleNamespace(error=None, grace_s=0.0),
            trace=SimpleNamespace(add=lambda *_, **__: None, flush=lambda: None),
        )
        cfg = RunConfig(name="r", folder=str(folder), **settings)
        self.loop = StepLoop(cfg, dispatcher, self.observer, lambda _: None)  # type: ignore[arg-type]

    def is_planned(self, num_steps: int) -> bool:
        return num_steps % self.every == 0

    def run(self, kill: tuple[int, str] | None = None) -> Started:
        """Take the steps, as a recipe does; `kill` names a step and a place in it."""
        self.loop.evaluations.plan(self, ["test"])
        start = self.loop.resume({"cursor": Cursor()})
        for step in self.loop.steps(NUM_STEPS, start):
            recorded = read_metrics(self.observer.file)
            is_recorded = any(row["step"] == step.index and REWARD in row for row in recorded)
            if kill == (step.index, "before"):
                raise Killed
            if self.is_planned(step.index) and not is_recorded:
                self.loop.record_evaluation(step.index, {REWARD: self.scores[step.index]}, {})
            if kill == (step.index, "after"):
                raise Killed
            self.taken.append(step.index)
        self.loop.close()
        return self

    @property
    def kept(self) -> list[int]:
        saved = Checkpoints(self.path / "checkpoints", 1, 0).complete()
        return [state.next_step for state in saved.values()]


#         0    1    2    3    4    5    6    7    8
RISING = [0.1, 0.2, 0.9, 0.3, 0.9, 0.8, 0.2, 0.3, 0.4]


def test_the_best_evaluation_is_kept_beside_the_newest(tmp_path: Path) -> None:
    started = Started(tmp_path, RISING).run()
    assert started.taken == [*range(NUM_STEPS)]
    assert started.kept == [4, 9], "of equals the newest, and weights that were not evaluated not"
    assert started.observer.sentences == []
    chosen, _ = rewind(started.path / "checkpoints", "best")
    assert chosen.name == "step_000004"


def test_each_evaluation_has_a_checkpoint(tmp_path: Path) -> None:
    started = Started(tmp_path, RISING, every=3, save_every=4, keep_checkpoints=9).run()
    assert started.kept == [3, 4, 6, 8, 9]
    (tmp_path / "w").mkdir()
    without = Started(tmp_path / "w", RISING, every=3, best="", save_every=4, keep_checkpoints=9)
    assert without.run().kept == [4, 8, 9]


@pytest.mark.parametrize(
    ("patience", "expected"), [(1, 4), (2, 5), (3, 6), (4, 7), (5, 8), (6, 9), (7, 9), (0, 9)]
)
def test_a_run_ends_after_so_many_evaluations_without_a_better_one(
    tmp_path: Path, patience: int, expected: int
) -> None:
    """The best is that after step 2; that after step 4 only equals it."""
    started = Started(tmp_path, RISING, patience=patience).run()
    assert started.taken == [*range(expected)]
    assert started.kept[-1] == expected, "the last weights are saved"
    assert started.loop.num_done == expected
    if expected < NUM_STEPS:
        (sentence,) = started.observer.sentences
        assert f"best after step 2, with 0.9, and not better in {patience} eval" in sentence
        assert f"ends after step {expected} (run.patience)" in sentence
    else:
        assert started.observer.sentences == []


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("killed_at", range(6))
def test_a_resumed_run_decides_as_the_undisturbed_one(
    tmp_path: Path, killed_at: int, place: str
) -> None:
    (tmp_path / "whole").mkdir()
    whole = Started(tmp_path / "whole", RISING, patience=3, save_every=2).run()
    assert whole.taken == [*range(6)]
    started = Started(tmp_path, RISING, patience=3, save_every=2)
    with pytest.raises(Killed):
        started.run(kill=(killed_at, place))
    again = Started(tmp_path, RISING, patience=3, save_every=2).run()
    assert again.taken[-1:] == [5]
    assert again.kept == whole.kept
    assert again.observer.sentences == whole.observer.sentences
    rows = [read_metrics(one.observer.file) for one in (again, whole)]
    assert [row.get(REWARD) for row in rows[0]] == [row.get(REWARD) for row in rows[1]]
    third = Started(tmp_path, RISING, patience=3, save_every=2).run()
    assert third.taken == [], "the same command takes no step more"
    assert third.observer.sentences == whole.observer.sentences
    patient = Started(tmp_path, RISING, patience=8, save_every=2).run()
    assert patient.taken == [6, 7, 8]


@pytest.mark.parametrize(
    ("metric", "values", "best"),
    [
        ("eval/loss", [3.0, 1.0, 2.0], 2),
        ("eval/test/perplexity", [3.0, 1.0, 2.0], 2),
        ("eval/test/accuracy", [0.3, 0.1, 0.2], 1),
        ("eval/test/reward", [0.1, None, 0.2], 3),  # None is written for what is no number
    ],
)
def test_less_is_better_for_a_loss(
    tmp_path: Path, metric: str, values: list[float | None], best: int
) -> None:
    (tmp_path / "config.toml").write_text(f"[run]\nbest = {json.dumps(metric)}\n")
    saved = Checkpoints(tmp_path / "checkpoints", 9, 0)
    rows = [json.dumps({"step": step, metric: value}) for step, value in enumerate(values, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    for step in range(1, 4):
        saved.save(CheckpointState(step, 0, -step), {"cursor": Cursor()})
    saved.wait_until_complete()
    assert best_of_run(tmp_path, saved.complete())[0].name == f"step_{best:06d}"
    (tmp_path / "config.toml").write_text("[run]\n")
    assert best_of_run(tmp_path, saved.complete())[0].name == "step_000001", "by the reward"
    (tmp_path / "config.toml").unlink()
    assert best_of_run(tmp_path, saved.complete())[0].name == "step_000001"


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (lambda one: one.load(9), "goes by evaluations, and this run has none"),
        (lambda one: one.plan(one, ["code"]), "no evaluation set 'test', only code"),
        (lambda one: one.add(0, {"eval/test/loss": 1.0}), "is no metric of the evaluation, which"),
    ],
)
def test_what_no_evaluation_finds_is_refused(
    tmp_path: Path, act: Callable[[Any], None], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        act(Evaluations(RunConfig(folder=str(tmp_path), best=REWARD)))


def test_a_patience_without_evaluations_in_the_run_is_refused(tmp_path: Path) -> None:
    started = Started(tmp_path, RISING, every=100, patience=2)
    with pytest.raises(ConfigError, match="patience = 2 counts evaluations between .* eval.every"):
        started.run()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"best": "reward"}, "best = 'reward': expected a metric of an evaluation"),
        ({"patience": 2}, "patience = 2: expected 0, unless run.best names"),
        ({"best": REWARD, "patience": -1}, "patience = -1: expected 0 or more"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RunConfig(**settings)
