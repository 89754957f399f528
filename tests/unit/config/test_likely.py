"""Did you mean: which known name or path a mistyped one is taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.cli.help import no_command
from spmd_rl.config.likely import did_you_mean, did_you_mean_path
from spmd_rl.controller.run.recipe import load_recipe
from spmd_rl.data.files.files import open_records
from spmd_rl.data.files.record import DataRecord
from spmd_rl.errors import ConfigError, DataError
from spmd_rl.model.read import model_folder
from spmd_rl.report.build import gather
from spmd_rl.rewards.names import find_grader
from spmd_rl.train.checkpoint.saved_run import named_run


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lable", "; did you mean label?"),
        ("ANSWER", "; did you mean Answer?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_letters_of_any_case(name: str, said: str) -> None:
    assert did_you_mean(name, ["label", "Answer"]) == said


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs/sft/hf").mkdir(parents=True)
    (tmp_path / "runs/sfftt").mkdir()
    (tmp_path / "Train.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "likely"),
    [
        ("train.jsnl", "Train.jsonl"),
        ("./runs/sfft/hf", "runs/sft/hf"),
        ("run/sft/hf", "runs/sft/hf"),
        ("runs/sft/fh/model", ""),
        ("elsewhere/at/all", ""),
        ("Train.jsonl/x", ""),
    ],
)
def test_a_path_is_likely_only_if_it_is_there(runs: Path, path: str, likely: str) -> None:
    assert did_you_mean_path(path) == (f"; did you mean {likely}?" if likely else "")
    absolute = f"; did you mean {runs / likely}?" if likely else ""
    assert did_you_mean_path(runs / path) == absolute


def test_each_error_of_a_mistyped_name_asks(runs: Path) -> None:
    record = DataRecord("f:1", {"answer": "1"})
    causes = {
        "runs/sft/hf": lambda: model_folder("runs/sftt/hf"),
        "Train.jsonl": lambda: open_records("train.jsonl"),
        "runs/sft": lambda: gather([Path("runs/stf")]),
        "runs": lambda: named_run(Path("Run")),
        "answer": lambda: record.value("Anwser"),
        "grpo": lambda: load_recipe("GRPO"),
        "exact": lambda: find_grader("reward", "Exact"),
    }
    for likely, cause in causes.items():
        with pytest.raises((ConfigError, DataError), match=rf"did you mean {likely}\?"):
            cause()
    assert "did you mean report?" in str(no_command("REPORT"))
    with pytest.raises(DataError, match=r"it has 'answer'\); settings such as prompts.answer_key"):
        record.value("label")
