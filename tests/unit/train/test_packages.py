"""Packages of trainers, which are missed before ranks start."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from spmd_rl.cli import command
from spmd_rl.errors import ConfigError
from spmd_rl.recipes import sft
from spmd_rl.train import packages

DEEP_EP = ["--trainer.backend.ep_dispatcher=deep_ep", "--split.train.ep=2"]


@pytest.mark.parametrize(
    ("module", "words", "sentence"),
    [
        ("megatron", ["--trainer.backend.kind=megatron"], r"needs megatron-core.*'\.\[megatron\]'"),
        (
            "transformer_engine",
            ["--trainer.backend.kind=megatron", "--trainer.backend.layers=transformer_engine"],
            r"needs transformer-engine.*'\.\[te\]'.*set it to 'local'",
        ),
        ("torchao", ["--trainer.optimizer.kind=adamw8bit"], r"needs torchao.*'\.\[torchao\]'"),
        ("deep_ep", DEEP_EP, r"needs tokenspeed-deepep.*'\.\[deep_ep\]'.*set it to \"torch\""),
    ],
)
def test_a_run_is_refused_before_its_ranks_start(
    module: str, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    missing, started = {module}, []
    monkeypatch.setattr(
        packages, "find_spec", lambda name: None if name in missing else find_spec("json")
    )
    monkeypatch.setattr(sft, "check", lambda cfg: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(command, "launch", lambda *_: started.append(1) or 0)
    given = ["sft", "--model=", "--data=x", f"--run.folder={tmp_path}", "--nproc=2", *words]
    with pytest.raises(ConfigError, match=sentence):
        command.launch_run(given)
    assert not started and not list(tmp_path.iterdir())
    missing.clear()
    assert command.launch_run(given) == 0 and started


def test_settings_that_need_no_package_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(packages, "find_spec", asked.append)
    packages.check_packages(sft.Config(model="", data="").trainer)
    assert asked == []
