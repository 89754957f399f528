"""NVRTC through cuda-bindings: where it cannot be used, a warning says so and others serve."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from spmd_rl.kernels.runtime import nvrtc


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    nvrtc.has_bindings.cache_clear()
    yield
    nvrtc.has_bindings.cache_clear()


def with_compiler(patch: pytest.MonkeyPatch, status: int) -> None:
    """Install bindings whose compiler answers with a status."""
    answer = SimpleNamespace(value=status, name="NVRTC_ERROR_INTERNAL_ERROR")
    bindings, compiler = ModuleType("cuda.bindings"), ModuleType("cuda.bindings.nvrtc")
    compiler.nvrtcVersion = lambda: (answer, 13, 0)  # type: ignore[attr-defined]
    bindings.nvrtc = compiler  # type: ignore[attr-defined]
    patch.setattr(nvrtc, "find_spec", lambda name: object())
    for name, module in {
        "cuda": ModuleType("cuda"),
        "cuda.bindings": bindings,
        "cuda.bindings.nvrtc": compiler,
    }.items():
        patch.setitem(sys.modules, name, module)


def test_a_compiler_that_answers_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, 0)
    assert nvrtc.has_bindings()


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_compiler(monkeypatch, 7)
    with pytest.warns(UserWarning, match="NVRTC_ERROR_INTERNAL_ERROR"):
        assert not nvrtc.has_bindings()


def test_without_the_package_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None)
    assert not nvrtc.has_bindings()
