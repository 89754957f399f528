"""Which model a path names, and the settings of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.errors import ConfigError
from spmd_rl.serve.command import settings_of
from spmd_rl.serve.config import KEY_VARIABLE, ServeConfig
from spmd_rl.serve.served_model import ServedModel


def test_the_environment_may_have_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert settings_of([str(folder)])[0].key == "secret"
    assert settings_of([str(folder), "--key=other"])[0].key == "other"
    far = ["--gateway.host=0.0.0.0", '--gateway.may_connect_from=["10.0.0.0/8"]']
    assert settings_of([str(folder), *far])[0].key == "secret"
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ConfigError, match="clients need a key"):
        settings_of([str(folder), *far])


@pytest.mark.parametrize("name", ["", "nothing", "checkpoints/step_000009"])
def test_a_path_that_names_no_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a model folder"):
        ServedModel.find(tmp_path / name)


def test_a_step_of_a_model_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="those of a run"):
        ServedModel.find(folder, step="3")


@pytest.mark.parametrize("setting", [{"port": -1}, {"port": 1 << 16}, {"seed": -1}])
def test_settings_that_cannot_be(setting: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(**setting)  # type: ignore[arg-type]
