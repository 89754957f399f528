"""docs/quickstart.md: its programs and commands run as they stand there, with fewer steps."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.dist.recipes.conftest import REPO

pytestmark = pytest.mark.dist

PAGE = (REPO / "docs/quickstart.md").read_text(encoding="utf-8")
FILES = re.compile(r"`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EVALUATIONS = re.compile(r"^spmd-rl eval (.*?)$", re.MULTILINE)
COMMANDS = re.compile(r"^spmd-rl run (\w+) (.*?)$", re.MULTILINE)


def test_the_quickstart_runs(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = dict(FILES.findall(PAGE))
    assert [*files] == ["make_model.py", "make_data.py", "my_reward.py", "ask.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    for name in ("make_model.py", "make_data.py"):
        runpy.run_path(name)
    commands = COMMANDS.findall(PAGE.replace("\\\n", ""))
    assert [recipe for recipe, _ in commands] == ["sft", "grpo"]
    for recipe, words in commands:
        ended = run(recipe, *shlex.split(words), "--steps=2", name=recipe, small=False, draws=True)
        assert ended.code == 0, ended.sentence
    assert {"reward/mean", "reward/ended"} <= ended.metrics[-1].keys()
    assert all(row["onpolicy/mismatched_tokens"] == 0 for row in ended.metrics)
    before, after = EVALUATIONS.findall(PAGE.replace("\\\n", ""))
    assert before.replace("sft", "grpo").replace("before", "after") == after
    words = shlex.split(after.replace("--run.name=after", ""))
    assert run("evaluate", *words, name="after", small=False).code == 0
    runpy.run_path("ask.py")
    assert "largest of 4 8 1: " in capfd.readouterr().out
