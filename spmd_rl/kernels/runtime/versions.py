"""The packages that our kernels in CuTe DSL are built on, in the versions that they were seen to
work with.

With another version, or without one, the package's own kernel or one in Triton takes their place,
with equal bits.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

DSL = {"nvidia-cutlass-dsl": "4.6.0", "quack-kernels": "0.6.3"}
FLASH = {"flash-attn-4": "4.0.0b19", **DSL}


@cache
def has_dsl() -> bool:
    return _are_there(DSL)


@cache
def has_flash() -> bool:
    return _are_there(FLASH)


def _are_there(versions: dict[str, str]) -> bool:
    return all(installed(package) == verified for package, verified in versions.items())


def installed(package: str) -> str | None:
    """The version that is installed; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
