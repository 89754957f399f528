"""Compiled CuTe DSL kernels on disk, with a compiler that stands in for the DSL's."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_rl.kernels.runtime.disk_cache import DiskCache

MODULE = "spmd_rl.kernels.runtime.cute_cache"


class Compiled:
    """A kernel just compiled: its object file is its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_text(f"{function_name} {self.name}")


def load_module(path: str, enable_tvm_ffi: bool) -> dict[str, str]:
    symbol, name = Path(path).read_text().split(" ")
    return {symbol: f"loaded {name}"}


@pytest.fixture
def cute_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    package, cute = ModuleType("cutlass"), ModuleType("cutlass.cute")
    package.cute = cute  # type: ignore[attr-defined]
    cute.runtime = SimpleNamespace(load_module=load_module)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cutlass", package)
    monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "gpu", lambda device: ("H100", 9, 0, 132))
    yield module
    sys.modules.pop(MODULE, None)


Start = Callable[[], tuple[Callable[..., object], list[tuple[object, ...]]]]


@pytest.fixture
def start(cute_cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return what starts a process: it gives a cached function, and the keys that it compiles."""

    def fresh() -> tuple[Callable[..., object], list[tuple[object, ...]]]:
        keys: list[tuple[object, ...]] = []
        monkeypatch.setattr(cute_cache, "user_cache", lambda: DiskCache(tmp_path / "cache"))
        cute_cache._environment.cache_clear()

        def matmul(*key: object) -> Compiled:
            keys.append(key)
            return Compiled(f"{key}".replace(" ", ""))

        return cute_cache.cached_on_disk(matmul), keys

    return fresh


def test_a_second_process_loads_what_the_first_compiled(start: Start) -> None:
    compiled, keys = start()
    kernel = compiled(64, True)
    assert isinstance(kernel, Compiled)
    assert compiled(64, True) is kernel
    assert keys == [(64, True)]
    compiled, keys = start()
    assert compiled(64, True) == "loaded (64,True)"
    assert compiled(64, True) is compiled(64, True)
    assert compiled(128, True).name == "(128,True)"  # type: ignore[attr-defined]
    assert keys == [(128, True)]


@pytest.mark.parametrize("part", ["gpu", "package_versions", "sources_digest", "host_processor"])
def test_another_environment_compiles_again(
    part: str, start: Start, cute_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()[0](64)
    monkeypatch.setattr(cute_cache, part, lambda *given: ("another",))
    compiled, keys = start()
    compiled(64)
    assert keys == [(64,)]


def test_another_setting_of_the_compiler_compiles_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()[0](64)
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    compiled, keys = start()
    compiled(64)
    assert keys == [(64,)]


def test_a_damaged_kernel_is_compiled_again(start: Start, tmp_path: Path) -> None:
    start()[0](64)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes() + b"!")
    compiled, keys = start()
    with pytest.warns(UserWarning, match="it is damaged"):
        compiled(64)
    assert keys == [(64,)]
    assert start()[0](64) == "loaded (64,)"


def test_a_kernel_that_does_not_load_is_compiled_again(start: Start, tmp_path: Path) -> None:
    start()[0](64)
    (path,) = (tmp_path / "cache").iterdir()
    DiskCache(tmp_path / "cache").write(path.name, b"of another format")
    compiled, keys = start()
    with pytest.warns(UserWarning, match="does not load"):
        compiled(64)
    assert keys == [(64,)]


def test_a_kernel_that_is_not_exported_runs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **named: object) -> None:
        raise RuntimeError("no target")

    monkeypatch.setattr(Compiled, "export_to_c", fail)
    with pytest.warns(UserWarning, match="not kept on disk: no target"):
        assert isinstance(start()[0](64), Compiled)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_cache_kernels_stay_in_memory(
    start: Start, cute_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(cute_cache, "user_cache", lambda: None)
    kernels = cute_cache.CompiledKernels("matmul", None)
    assert 64 not in kernels
    kernels[64] = Compiled("64")
    assert 64 in kernels


def test_flash_attention_keeps_its_kernels_there_too(
    start: Start, cute_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package looks keys up with `in`, then stores and takes kernels by subscripts."""

    def _flash_attn_fwd() -> None:
        pass

    def process() -> Any:
        start()
        cute_cache.flash_interface.cache_clear()
        _flash_attn_fwd.compile_cache = {}  # type: ignore[attr-defined]
        cute_cache.flash_interface()
        return _flash_attn_fwd.compile_cache  # type: ignore[attr-defined]

    interface = ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = _flash_attn_fwd  # type: ignore[attr-defined]
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    for name, module in zip(names, (ModuleType("a"), ModuleType("b"), interface), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["flash_attn.cute"].interface = interface  # type: ignore[attr-defined]
    monkeypatch.setattr(cute_cache, "sources_digest", lambda: "")
    kernels = process()
    key = (Compiled, 64, None)
    assert key not in kernels
    kernels[key] = Compiled("fwd")
    assert kernels[key].name == "fwd"
    kernels[object(), 64] = Compiled("in memory alone")
    kernels = process()
    assert key in kernels
    assert kernels[key] == "loaded fwd"
    assert (object(), 64) not in kernels
