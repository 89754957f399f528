"""The numeric contract lists what the kernels define: a changed definition is another contract."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmd_rl.controller.contracts import disagreement
from spmd_rl.kernels.attention import backend, flash, flash_tile
from spmd_rl.kernels.runtime import padding, versions
from spmd_rl.kernels.vocab import logprob, sampling

Facts = dict[str, str | int]
CONTRACT = import_module("spmd_rl.kernels.contract")  # not the function
LINEAR = import_module("spmd_rl.kernels.linear.linear")
VERSIONS = versions.FLASH | {"nvidia-cublas": "13.1.0"}


def facts_of(device: str, dtype: torch.dtype) -> Facts:
    """Return the facts as a new process would list them, with its imports repeated."""
    return runpy.run_path(str(CONTRACT.__file__))["contract"](torch.device(device), dtype, 128)


def cpu_facts() -> Facts:
    return facts_of("cpu", torch.float32)


def gpu_facts() -> Facts:
    return facts_of("cuda", torch.bfloat16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make a Hopper GPU and its packages report themselves where there are none."""
    made = {
        "triton": SimpleNamespace(__version__="3.6.0"),
        "norm": SimpleNamespace(NUM_WARPS=4, TILE_ELEMENTS=1024),
        "logprob": SimpleNamespace(SUM_WARPS=4),
        "attention": SimpleNamespace(block_tile=lambda dtype, dim: (64, 64, 4, 2)),
        "versions": dict(VERSIONS),
    }
    monkeypatch.setitem(sys.modules, "triton", made["triton"])
    monkeypatch.setitem(sys.modules, "spmd_rl.kernels.rowwise.norm_triton", made["norm"])
    monkeypatch.setitem(sys.modules, "spmd_rl.kernels.vocab.logprob_triton", made["logprob"])
    monkeypatch.setitem(sys.modules, "spmd_rl.kernels.attention.blocked_triton", made["attention"])

    def version(package: str) -> str:
        if package not in made["versions"]:
            raise PackageNotFoundError(package)
        return made["versions"][package]

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(backend, "flash_supports", lambda dim, dtype, device: device.type == "cuda")
    monkeypatch.setattr(flash, "flash_version", lambda: version("flash-attn-4"))
    monkeypatch.setattr(LINEAR, "keeps_chain", lambda *given: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return made


def changed(facts: Callable[[], Facts], change: Callable[[], None]) -> set[str]:
    before = facts()
    assert facts() == before
    change()
    after = facts()
    assert disagreement({"before": before, "after": after})
    return {key for key in {**before, **after} if before.get(key) != after.get(key)}


@pytest.mark.parametrize(
    ("module", "name", "value", "fact"),
    [
        (padding, "ROW_TILE", 32, "row_tile"),
        (logprob, "NUM_VOCAB_SHARDS", 4, "vocab_shards"),
        (logprob, "VOCAB_CHUNK", 512, "vocab_chunk"),
        (logprob, "TEMPERATURE_RULE", "logits / T", "temperature"),
        (sampling, "RANDOM_SCHEME", "Philox", "random"),
    ],
)
def test_rules_of_every_device(
    module: Any,
    name: str,
    value: object,
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
    hopper: dict[str, Any],
) -> None:
    with monkeypatch.context() as patch:
        assert changed(cpu_facts, lambda: patch.setattr(module, name, value)) == {fact}
    assert changed(gpu_facts, lambda: monkeypatch.setattr(module, name, value)) == {fact}


@pytest.mark.parametrize(
    ("device", "capability", "asked", "expected"),
    [
        ("cpu", 9, "auto", "float32"),
        ("cuda", 9, "auto", "bfloat16"),
        ("cuda", 7, "auto", "float32"),
        ("cuda", 9, "float32", "float32"),
        ("cpu", 9, "bfloat16", "bfloat16"),
    ],
)
def test_the_type_of_numbers_is_the_contracts(
    device: str, capability: int, asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert CONTRACT.dtype_of(asked, torch.device(device)) == expected


def test_an_edited_kernel_is_another_contract(tmp_path: Path) -> None:
    sources = CONTRACT.SOURCES
    assert {"cute.py", "rope_triton.py", "contract.py"} <= {path.name for path in sources}
    edited = tmp_path / "rope_triton.py"
    edited.write_text(next(path for path in sources if path.name == edited.name).read_text() + "\n")
    others = tuple(edited if path.name == edited.name else path for path in sources)
    assert CONTRACT.digest_of(others) != CONTRACT.digest_of(sources) == cpu_facts()["kernels"]


def test_flash_attention_of_another_version_was_not_compared(hopper: dict[str, Any]) -> None:
    assert gpu_facts()["attention"] == f"flash-attn-4 {VERSIONS['flash-attn-4']} causal, one split"
    hopper["versions"]["flash-attn-4"] = "4.1"
    assert gpu_facts()["attention"] == "flash-attn-4 4.1 causal, one split, version not compared"


def test_the_unit_of_widths_is_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed(cpu_facts, lambda: monkeypatch.setattr(padding, "COLUMN_UNIT", 8)) == {
        "column_unit"
    }


@pytest.mark.parametrize(
    ("name", "fact"),
    [("blocked.KV_BLOCK", "kv_block"), ("row_layout.QUERY_TILE", "query_tile")],
)
def test_attention_of_the_cpu(
    name: str, fact: str, monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]
) -> None:
    before = gpu_facts()
    assert changed(
        cpu_facts, lambda: monkeypatch.setattr(f"spmd_rl.kernels.attention.{name}", 32)
    ) == {fact}
    assert gpu_facts() == before


def test_key_block_of_the_gpu(monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]) -> None:
    assert gpu_facts()["kv_block"] == 128
    assert changed(
        gpu_facts, lambda: monkeypatch.setattr(flash_tile, "key_block", lambda dim: 64)
    ) == {"kv_block"}


def test_attention_of_the_gpu_without_flash(
    monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]
) -> None:
    monkeypatch.setattr(backend, "flash_supports", lambda *given: False)
    assert gpu_facts()["attention"] == "keys in ascending blocks"
    assert "kv_block" not in gpu_facts()

    def narrower() -> None:
        monkeypatch.setattr(hopper["attention"], "block_tile", lambda *given: (64, 32, 4, 2))

    assert changed(gpu_facts, narrower) == {"attention_tile"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert gpu_facts()["attention"] == "keys in ascending blocks, not compared"


@pytest.mark.parametrize(
    ("module", "name", "fact"),
    [
        ("norm", "NUM_WARPS", "norm_warps"),
        ("norm", "TILE_ELEMENTS", "norm_elements"),
        ("logprob", "SUM_WARPS", "vocab_warps"),
        ("triton", "__version__", "triton"),
    ],
)
def test_triton(
    module: str, name: str, fact: str, monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]
) -> None:
    assert changed(gpu_facts, lambda: monkeypatch.setattr(hopper[module], name, 8)) == {fact}


@pytest.mark.parametrize(
    ("package", "fact"),
    [
        *((package, package) for package in versions.DSL),
        ("nvidia-cublas", "cublas"),
        ("flash-attn-4", "attention"),
    ],
)
def test_packages(package: str, fact: str, hopper: dict[str, Any]) -> None:
    assert changed(gpu_facts, lambda: hopper["versions"].update({package: "0.1"})) == {fact}


def test_packages_that_are_not_there(hopper: dict[str, Any]) -> None:
    for package in (*versions.DSL, "nvidia-cublas"):
        del hopper["versions"][package]
    facts = gpu_facts()
    assert [facts[name] for name in (*versions.DSL, "cublas")] == ["", "", ""]


def test_cublas_of_cuda_12(hopper: dict[str, Any]) -> None:
    hopper["versions"]["nvidia-cublas-cu12"] = hopper["versions"].pop("nvidia-cublas")
    assert gpu_facts()["cublas"] == VERSIONS["nvidia-cublas"]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 1)),
            "capability",
        ),
        (
            lambda patch: patch.setattr(
                torch.cuda, "get_device_name", lambda device: "NVIDIA H100"
            ),
            "gpu",
        ),
        (lambda patch: patch.setattr(torch.version, "cuda", "12.8"), "cuda"),
        (lambda patch: patch.setattr(LINEAR, "keeps_chain", lambda *given: False), "linear"),
    ],
    ids=["capability", "gpu", "cuda", "linear"],
)
def test_the_gpu(
    change: Callable[[pytest.MonkeyPatch], None],
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
    hopper: dict[str, Any],
) -> None:
    assert changed(gpu_facts, lambda: change(monkeypatch)) == {fact}


@pytest.mark.parametrize("fact", ["isa", "threads"])
def test_the_cpu(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {
        "isa": lambda: monkeypatch.setattr(
            torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX"
        ),
        "threads": lambda: monkeypatch.setattr(torch, "get_num_threads", lambda: 99),
    }
    assert changed(cpu_facts, others[fact]) == {fact}


@pytest.mark.parametrize(
    ("flag", "fact"),
    [("allow_tf32", "tf32"), ("allow_bf16_reduced_precision_reduction", "bf16_reduced")],
)
def test_flags_of_precision(
    flag: str, fact: str, monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]
) -> None:
    flags = SimpleNamespace(allow_tf32=False, allow_bf16_reduced_precision_reduction=False)
    monkeypatch.setattr(torch.backends.cuda, "matmul", flags)
    assert changed(gpu_facts, lambda: setattr(flags, flag, True)) == {fact}


def test_the_type_of_numbers_is_a_fact() -> None:
    kinds = [facts_of("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert [key for key in kinds[0] if kinds[0][key] != kinds[1][key]] == ["dtype"]


def test_tiles_are_free_where_that_was_measured(
    monkeypatch: pytest.MonkeyPatch, hopper: dict[str, Any]
) -> None:
    assert gpu_facts()["linear"] == "one ascending chain"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert gpu_facts()["linear"] == "one ascending chain, tiles not compared"
