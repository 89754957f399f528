"""Records that a shipped grader cannot grade are refused before a run, with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd_rl.check import inputs
from spmd_rl.check.inputs import check_evaluation, check_inputs
from spmd_rl.cli.data.command import main
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.errors import DataError
from spmd_rl.evaluation.config import EvalConfig, EvalSet
from spmd_rl.hooks.config import HookConfig
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rewards.gold import CHECKS, check_prompt
from spmd_rl.rewards.names import GRADERS
from spmd_rl.rollout.engine import SamplingConfig
from tests.unit.rewards.cases import ask

MODEL = Path(__file__).parents[3] / "examples/arithmetic/model"
KWARGS = "instruction_id_list", "kwargs"
# a record that the grader takes, one that it does not, and what is said of it
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "math": (
        {"answer": r"\frac{1}{2}"},
        {"answer": "???"},
        "'???' of this prompt is no",
    ),
    "boxed_math": ({"answer": "#### 72"}, {"answer": ""}, "the answer of this prompt is empty"),
    "deepscaler": ({"answer": r"\boxed{3}"}, {"answer": r"\boxed{???}"}, "is no mathematics"),
    "dapo": ({"answer": "x=3"}, {"answer": "x=1, y=2"}, "`dapo` would only compare what follows"),
    "multiple_choice": (
        {"answer": "B", "choices": ["x", "y"]},
        {"answer": "C", "choices": ["x", "y"]},
        "the answer 'C' of this prompt is neither a letter up to B nor the text of a choice",
    ),
    "exact_match": ({"answers": ["a"]}, {"answers": "a"}, "'answers' of this record is no list"),
    "f1": ({"answers": ["a"]}, {"answers": [1]}, "'answers' of this record is no list"),
    "ifeval": (
        dict(zip(KWARGS, (["punctuation:no_comma"], [{}]), strict=True)),
        dict(zip(KWARGS, (["punctuation:no_commas"], [{}]), strict=True)),
        "the instruction 'punctuation:no_commas' of this record is none of those of IFEval",
    ),
    "ifbench": (
        dict(zip(KWARGS, (["count:numbers"], [{"N": 2}]), strict=True)),
        dict(zip(KWARGS, (["count:numbers"], [{}]), strict=True)),
        "'kwargs' of this record lacks 'N' for count:numbers",
    ),
    "code": ({"tests": ["assert f() == 1"]}, {"tests": []}, "tests: there are none"),
}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    lines = [json.dumps({"prompt": "1+1=", "answer": "1"} | row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def check(data: str, reward: Any, **prompts: Any) -> None:
    check_inputs(model=str(MODEL), data=data, reward=reward, prompts=PromptConfig(**prompts))


@pytest.mark.parametrize("name", [name for name in CASES if name != "code"])
def test_a_record_that_cannot_be_graded_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    good, bad, sentence = CASES[name]
    check(write(tmp_path / "good.jsonl", [good]), name)
    with pytest.raises(DataError) as told:
        check(write(tmp_path / "bad.jsonl", [good, good, bad]), {GRADERS.get(name, name): 1.0})
    assert str(told.value).startswith(f"{tmp_path / 'bad.jsonl'}:3: ")
    assert sentence in str(told.value)


def test_every_grader_with_a_check_has_cases_and_is_known() -> None:
    assert CHECKS.keys() <= CASES.keys() <= GRADERS.keys()


@pytest.mark.parametrize("name", CASES)
def test_data_check_says_it_of_every_record(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, sentence = CASES[name]
    path = write(tmp_path / "data.jsonl", [bad, good, bad])
    assert main(["check", path, "--reward", GRADERS[name]]) == 1
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.startswith(f"{path}:") or "records" in line]
    assert [line.startswith(f"{path}:{n}: ") for n, line in zip((1, 3), lines, strict=False)] == [
        True,
        True,
    ]
    assert sentence in lines[0]
    assert lines[-1] == "3 records, 2 problems"
    assert main(["check", path]) == 0, "without a grader, any answer will do"


def test_a_record_is_checked_by_the_graders_that_it_names(tmp_path: Path) -> None:
    rows = [{"answer": "2", "by": None}, {"answer": "???", "by": "exact_match"}]
    check(write(tmp_path / "a.jsonl", rows), {"math": 1.0, "exact_match": 1.0}, reward_key="by")
    rows[1]["by"] = {"spmd_rl.rewards.answers.math:math": 0.5}
    with pytest.raises(DataError, match=r"b\.jsonl:2: the answer '\?\?\?' of this prompt"):
        check(write(tmp_path / "b.jsonl", rows), {"math": 1.0, "exact_match": 1.0}, reward_key="by")


def test_a_short_name_and_the_full_one_are_the_same_grader(tmp_path: Path) -> None:
    rows = [{"by": "spmd_rl.rewards.answers.math:math"}, {"by": "math"}]
    path = write(tmp_path / "data.jsonl", rows)
    check(path, "math", reward_key="by")
    check(path, "spmd_rl.rewards.answers.math:math", reward_key="by")


def test_only_the_first_records_of_a_huge_file_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "CHECKED_GOLDS", 2)
    check(write(tmp_path / "data.jsonl", [{}, {}, {"answer": "?"}]), "math")
    with pytest.raises(DataError, match=r"data\.jsonl:2: "):
        check(write(tmp_path / "data.jsonl", [{}, {"answer": "?"}]), "math")


def test_data_check_says_how_many_records_were_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spmd_rl.cli.data.inspect.MAX_GRADED", 2)
    monkeypatch.setattr("spmd_rl.cli.data.command.MAX_GRADED", 2)
    path = write(tmp_path / "data.jsonl", [{}, {}, {"answer": "?"}])
    assert main(["check", path, "--reward=math"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "3 records, 0 problems; graders were asked about the first 2 records"


def test_the_records_of_an_evaluation_set_are_checked_by_its_own_grader(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", [{"answer": "???"}])

    def evaluated(reward: str) -> None:
        cfg = SimpleNamespace(
            eval=EvalConfig(sets={"a": EvalSet(path, reward=reward)}),
            model=str(MODEL),
            reward="exact",
            hooks=HookConfig(),
            graders=GraderConfig(),
            sampling=SamplingConfig(),
            prompts=PromptConfig(),
        )
        check_evaluation(cfg)

    evaluated("")
    evaluated("exact_match")
    with pytest.raises(DataError, match=r"set\.jsonl:1: the answer '\?\?\?'"):
        evaluated("math")


def test_functions_of_the_user_have_no_check() -> None:
    check_prompt(ask("anything"), ["rules.py:score", "exact", "dapo", "judge"])
