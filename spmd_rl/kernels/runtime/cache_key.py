"""Facts that compiled kernels and measured choices depend on: parts of their keys on disk."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from spmd_rl.kernels.runtime.versions import FLASH, installed

# They compile kernels, load them or run beside them, as do the packages of `FLASH`.
TOOLS = (
    "torch",
    "triton",
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-cu13",
)
SOURCES = ("spmd_rl.kernels", "flash_attn", "quack")  # packages


@cache
def package_versions() -> tuple[object, ...]:
    packages = tuple((package, installed(package)) for package in (*FLASH, *TOOLS))
    return tuple(sys.version_info[:2]), torch.version.cuda, packages


@cache
def sources_digest() -> str:
    """Return a digest of the Python sources of all kernels."""
    specs = filter(None, map(find_spec, SOURCES))
    return digest_of(
        Path(folder) for spec in specs for folder in spec.submodule_search_locations or ()
    )


def digest_of(folders: Iterable[Path]) -> str:
    """Return a digest of the names and contents of the Python files below some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@cache
def gpu(device: torch.device) -> tuple[object, ...]:
    facts = torch.cuda.get_device_properties(device)
    return facts.name, facts.major, facts.minor, facts.multi_processor_count


@cache
def host_processor() -> tuple[str, str]:
    """Return the host processor's instruction sets: a home folder may serve several hosts."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine(), features
