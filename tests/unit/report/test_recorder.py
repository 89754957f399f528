"""The recorder of a run: the logs it accepts, and its own messages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.config.load import load
from spmd_rl.config.run import RunConfig
from spmd_rl.controller.run.steps import LoopStep
from spmd_rl.errors import ConfigError, DataError, SpmdError
from spmd_rl.observe.metrics_log import read_metrics
from spmd_rl.recipes import collect, distill, grpo, grpo_async, sft
from spmd_rl.report.about import about, read_provenance
from spmd_rl.report.recorder import Recorder
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic"
SAME = "in 3 steps, all samples of every prompt had the same reward, so nothing was learned"


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)


@pytest.fixture
def new_recorder(tmp_path: Path) -> Any:
    def build(num_steps: int) -> Recorder:
        run = RunConfig(folder=str(tmp_path), name="r", sinks=())
        recorder = Recorder(run, Config(run), 1)
        recorder.on_steps(0, num_steps)
        return recorder

    return build


def group(*rewards: float, **parts: float) -> Group:
    one, numbers = np.zeros(1, np.int32), np.zeros(1, np.float32)
    samples = [
        Sample(0, i, one, numbers, one, "completed", reward=r, parts=parts)
        for i, r in enumerate(rewards)
    ]
    return Group(Prompt(0, one), samples)


def test_tokens_have_an_age_only_where_something_is_trained(tmp_path: Path) -> None:
    words = [f"model={EXAMPLE / 'model'}", f"data={EXAMPLE / 'train.jsonl'}", "reward=exact"]
    ages = {}
    for name, recipe in (("grpo", grpo), ("collect", collect)):
        run = RunConfig(folder=str(tmp_path), name=name)
        recorder = Recorder(run, replace(load(recipe.Config, None, words), run=run), 1)
        recorder.on_steps(0, 2)
        take(recorder, [(0, 1), (0, 1)])
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        ages[name] = [row.get("version/lag_max") for row in rows]
    assert ages == {"grpo": [0, 1], "collect": [None, None]}


def take(recorder: Recorder, rewards: list[tuple[float, ...]]) -> None:
    for index, of_step in enumerate(rewards):
        step = LoopStep(index, recorder)
        step.log([group(*of_step), group(1, 1)], {"mine": 1.0})
        recorder.on_step(step)
    recorder.close()


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([(0, 0)] * 5, 1),
        ([(0, 0), (1, 1), (0, 0)], 1),
        ([(0, 0)] * 2, 0),
        ([(0, 0), (0, 1), (0, 0), (0, 0), (0, 0)], 0),
        ([(0, 0), (0, 0), (0, 1), (0, 0), (0, 0), (0, 0)], 0),
    ],
)
def test_first_steps_without_a_difference_are_told_once(
    new_recorder: Any,
    capsys: pytest.CaptureFixture[str],
    rewards: list[tuple[float, ...]],
    told: int,
) -> None:
    take(new_recorder(len(rewards)), rewards)
    assert capsys.readouterr().err.count(SAME) == told


def test_parts_are_in_the_line_of_their_step(new_recorder: Any, tmp_path: Path) -> None:
    recorder = new_recorder(1)
    step = LoopStep(0, recorder)
    step.log([group(1, 0, form=0.25)])
    recorder.on_step(step)
    recorder.close()
    (row,) = read_metrics(tmp_path / "r/metrics.jsonl")
    assert (row["reward/form"], row["reward/mean"]) == (0.25, 0.5)


def test_a_run_that_ended_in_its_warm_up_does_not_say_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunConfig(folder=str(tmp_path), name="r")
    recorder = Recorder(run, Config(run), 1)
    recorder.on_warmup(2)
    recorder.on_step(LoopStep(-2, recorder))
    recorder.close()
    assert "holds" not in capsys.readouterr().out


@pytest.mark.parametrize("sentence", ["nothing is left: the run ends after step 1", ""])
def test_a_run_that_ended_early_says_why_on_screen_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: str
) -> None:
    run = RunConfig(folder=str(tmp_path), name="r")
    recorder = Recorder(run, Config(run), 1)
    recorder.on_steps(0, 9)
    recorder.on_step(LoopStep(0, recorder))
    if sentence:
        recorder.on_early_end(sentence)
    recorder.close()
    facts = about(run.path, {}, None, read_provenance(run.path))
    assert facts.get("ended early", "") == sentence
    output = capsys.readouterr().out
    assert (f"{sentence}\n" in output and "r holds" in output) == bool(sentence)


def test_phases_before_step_1_are_in_its_line(tmp_path: Path) -> None:
    run = RunConfig(folder=str(tmp_path), name="r")
    recorder = Recorder(run, Config(run), 1, ["grpo", "--steps=1"])
    recorder.on_phase("eval", None)
    recorder.on_phase("eval", 3.0)
    recorder.on_phase("warm-up", None)
    recorder.on_warmup(2)
    assert recorder._monitor is not None
    assert recorder._monitor._progress.phase == "warm-up"
    for index in (-2, -1):
        step = LoopStep(index, recorder)
        step.log({"warmup/loss": 0.5})
        recorder.on_step(step)
    recorder.on_phase("warm-up", 4.0)
    recorder.on_steps(0, 1)
    recorder.on_step(LoopStep(0, recorder))
    recorder.close()
    *warmup, row = read_metrics(tmp_path / "r/metrics.jsonl")
    assert [one["step"] for one in warmup] == [-1, 0]
    assert not [name for one in warmup for name in one if name.startswith(("perf/", "reward/"))]
    assert (row["before/eval"], row["before/warm-up"]) == (3, 4)
    facts = json.loads((tmp_path / "r/run.json").read_text())
    assert facts["command"] == "spmd-rl run grpo --steps=1"


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (3, "3 .int."),
        ("hello", "'hello' .str."),
        ([1, 2], ".1, 2. .list."),
        (None, "None .NoneType."),
    ],
)
def test_what_cannot_be_logged_is_refused_where_it_is_logged(
    new_recorder: Any, what: Any, shown: str
) -> None:
    recorder = new_recorder(1)
    with pytest.raises(
        SpmdError, match=f"step.log takes lists of groups and dicts of metrics, not {shown}"
    ):
        LoopStep(0, recorder).log(what)
    recorder.close()


def test_supervised_learning_has_a_rate_of_its_own() -> None:
    words = ["model=m", "data=d", "trainer.seed=1"]
    assert (
        load(sft.Config, None, words).trainer.lr,
        load(grpo.Config, None, words).trainer.lr,
    ) == (1e-5, 1e-6)
    assert load(sft.Config, None, [*words, "trainer.lr=1e-6"]).trainer.lr == 1e-6


NO_REPLAY = SamplingConfig(replay_filters=False)


@pytest.mark.parametrize(
    ("sampling", "engine", "named"),
    [
        (NO_REPLAY, NativeEngineConfig(), []),
        (replace(NO_REPLAY, temperature=0.7, stop=("end",)), NativeEngineConfig(), []),
        (SamplingConfig(top_p=0.9), NativeEngineConfig(), []),
        (replace(NO_REPLAY, top_p=0.9), NativeEngineConfig(), ["sampling.top_p = 0.9"]),
        (
            replace(NO_REPLAY, top_k=5, min_p=0.1),
            NativeEngineConfig(),
            ["sampling.top_k = 5", "sampling.min_p = 0.1"],
        ),
        (SamplingConfig(top_p=0.9), SglangEngineConfig(), ["sampling.top_p = 0.9"]),
    ],
)
def test_a_run_that_trains_over_other_tokens_than_it_draws_from_says_so_once_and_keeps_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sampling: SamplingConfig,
    engine: NativeEngineConfig | SglangEngineConfig,
    named: list[str],
) -> None:
    cfg = grpo.Config(
        model="m",
        data="d",
        run=RunConfig(folder=str(tmp_path), name="r"),
        sampling=replace(sampling, num_samples=2),
        engine=engine,
    )
    take(Recorder(cfg.run, cfg, 1), [])
    notes = json.loads((tmp_path / "r/plan.json").read_text())["notes"]
    assert [note.partition(" excludes tokens from sampling")[0] for note in notes] == named
    assert [
        line for line in capsys.readouterr().out.splitlines() if "excludes tokens" in line
    ] == notes


def test_a_replay_of_filters_is_refused_where_a_loss_is_over_all_tokens() -> None:
    words = ["model=m", "teacher=t", "data=d", "form=topk", "sampling.top_p=0.9"]
    with pytest.raises(ConfigError, match="replay_filters = True: expected false beside"):
        load(distill.Config, None, words)
    load(distill.Config, None, [*words, "sampling.replay_filters=false"])
    load(distill.Config, None, [*words, "form=sampled"])


def test_greedy_sampling_is_refused_where_it_would_be_learned_from() -> None:
    words = ["model=m", "data=d", "sampling.temperature=0"]
    for recipe in (grpo, grpo_async):
        with pytest.raises(ConfigError, match="sampling.temperature = 0.0: expected more than 0"):
            load(recipe.Config, None, words)
    assert SamplingConfig(temperature=0).temperature == 0


def test_a_prompt_that_is_a_number_is_refused_before_anything_starts(tmp_path: Path) -> None:
    data = tmp_path / "numbers.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": 2}\n{"prompt": 12, "answer": 2}\n')
    words = [f"model={EXAMPLE / 'model'}", f"data={data}", "trainer.init=random"]
    for recipe in (grpo, sft):
        with pytest.raises(DataError, match="numbers.jsonl:2: prompt: expected a string, got 12"):
            recipe.check(load(recipe.Config, None, words))


def test_an_end_that_is_no_token_of_the_model_is_refused_before_anything_starts() -> None:
    model, data = EXAMPLE / "model", EXAMPLE / "train.jsonl"
    words = [f"model={model}", f"data={data}", "trainer.init=random"]
    grpo.check(load(grpo.Config, None, [*words, "sampling.stop_ids=[3]"]))
    with pytest.raises(
        ConfigError, match="sampling.stop_ids holds 4000: the ids of this model end at "
    ):
        grpo.check(load(grpo.Config, None, [*words, "sampling.stop_ids=[3, 4000]"]))
