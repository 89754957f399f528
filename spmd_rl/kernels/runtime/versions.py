"""Versions of the packages that our CuTe DSL kernels are built on and were verified with.

With another version, or without a package, the package's own kernel or one in Triton runs instead,
with equal bits.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DSL = {"nvidia-cutlass-dsl": "4.6.0", "quack-kernels": "0.6.3"}
FLASH = {"flash-attn-4": "4.0.0b19", **DSL}


@cache
def has_dsl() -> bool:
    return _are_installed(DSL)


@cache
def has_flash() -> bool:
    return _are_installed(FLASH)


def _are_installed(versions: dict[str, str]) -> bool:
    return all(installed(package) == verified for package, verified in versions.items())


def installed(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
