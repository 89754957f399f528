"""CuTe DSL kernels run with the versions that they were verified with, which are installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from spmd_rl.kernels.runtime import versions


@pytest.mark.parametrize(
    ("installed", "dsl", "flash"),
    [
        (versions.FLASH, True, True),
        (versions.DSL, True, False),
        (versions.FLASH | {"quack-kernels": "0.7.0"}, False, False),
        (versions.FLASH | {"flash-attn-4": "4.0.0"}, True, False),
        ({}, False, False),
    ],
    ids=["all", "no attention", "a newer quack", "a newer attention", "none"],
)
def test_only_verified_versions_are_built_on(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], dsl: bool, flash: bool
) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(versions, "version", version)
    assert (versions.has_dsl.__wrapped__(), versions.has_flash.__wrapped__()) == (dsl, flash)


def test_the_gpu_extra_installs_them() -> None:
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    assert [
        f'"{package}=={wanted}"'
        for package, wanted in versions.FLASH.items()
        if f'"{package}=={wanted}"' not in setup
    ] == []
