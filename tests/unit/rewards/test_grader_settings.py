"""Settings of graders: what is refused, how they reach a grader, and those that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spmd_rl.config.dump import as_data
from spmd_rl.config.load import load
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.signatures import load_reward
from spmd_rl.recipes import collect, grpo, rejection_sampling
from spmd_rl.rewards.config import (
    CodeConfig,
    Criterion,
    GraderConfig,
    JudgeConfig,
    RemoteConfig,
    graders_of,
)
from spmd_rl.rewards.names import GRADERS
from spmd_rl.rewards.ready import CHECKED, check_graders, checked_graders
from tests.laws.source import ROOT

PAGE = ROOT / "docs/rewards.md"
_TOML = re.compile(r"^```toml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (CodeConfig, {"cpu_s": 0}, "cpu_s = 0: expected 1 or more"),
        (CodeConfig, {"memory_mb": 1}, "memory_mb = 1: expected 16 or more"),
        (CodeConfig, {"open_files": 3}, "open_files = 3: expected 8 or more"),
        (CodeConfig, {"test_s": float("inf")}, "test_s = inf: expected more than 0, and finite"),
        (CodeConfig, {"language": " "}, "language = ' ': expected a word such as python"),
        (RemoteConfig, {"url": "grader:8000"}, "url = 'grader:8000': expected http://HOST"),
        (RemoteConfig, {"url": "http://[x"}, "expected http://HOST"),
        (RemoteConfig, {"url": "http://me:secret@x/"}, "url: a password does not belong"),
        (RemoteConfig, {"headers_from": {"A": "Bearer x"}}, "headers_from = 'a value': expected"),
        (RemoteConfig, {"retries": -1}, "retries = -1: expected 0 or more"),
        (JudgeConfig, {"deadline_s": 0.0}, "deadline_s = 0.0: expected more than 0"),
        (JudgeConfig, {"checklist": (Criterion("a", "x"),) * 2}, "expected names that differ"),
        (JudgeConfig, {"key_from": "sk-123"}, "key_from = 'a value': expected names of"),
        (Criterion, {"name": "a", "text": "x", "weight": 0.0}, "weight = 0.0: expected more"),
        (Criterion, {"name": "a", "text": " "}, "text = ' ': expected a sentence"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(
    cls: Any, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as told:
        cls(**settings)
    assert sentence in str(told.value)
    assert "sk-123" not in str(told.value) and "secret" not in str(told.value)


@pytest.mark.parametrize("recipe", [grpo, collect, rejection_sampling])
def test_settings_reach_a_grader_as_they_are(recipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\ndata = "d"\n[[graders.judge.checklist]]\nname = "a"\ntext = "b"')
    cfg = load(recipe.Config, path, ["graders.code.test_s=3"])
    graders = graders_of(as_data(cfg))
    assert graders == cfg.graders
    assert (graders.code.test_s, graders.judge.checklist) == (3.0, (Criterion("a", "b"),))
    assert graders_of({}) == GraderConfig()


def test_settings_of_the_page_fit_a_recipe(tmp_path: Path) -> None:
    blocks = [block for block in _TOML.findall(PAGE.read_text("utf-8")) if "[graders." in block]
    assert len(blocks) == 4
    for block in blocks:
        path = tmp_path / "run.toml"
        path.write_text('model = "m"\ndata = "d"\n' + block)
        assert load(grpo.Config, path).graders != GraderConfig()


def test_short_names_lead_to_graders_and_those_that_need_it_are_checked() -> None:
    for short in CHECKED:
        assert load_reward(GRADERS[short]).name == short
    both = ["judge", "spmd_rl.rewards.code.graders:code", "mine.py:code"]
    assert checked_graders(both) == {"judge", "code"}
    assert checked_graders(["mine.py:judge"]) == set()
    remote = GraderConfig(remote=RemoteConfig(url="http://x", deadline_s=30.0))
    check_graders(["remote"], remote, 0.0)
    check_graders(["remote"], remote, 31.0)
    with pytest.raises(ConfigError, match=r"deadline_s = 30.0: expected less than hooks.deadline"):
        check_graders(["remote"], remote, 30.0)
