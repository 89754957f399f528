"""RL post-training of language models in one torchrun world.

    import spmd_rl as rl

gives a recipe the names that it needs: the controller's types, the roles, their configs. Each name
is imported when it is first used, so that importing the package costs nothing and needs no torch.
`__init__.pyi` lists the names for type checkers, and for `__getattr__` here.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

from spmd_rl.mkl import pin_sums

__version__ = "0.1.0"

pin_sums()

_HOMES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
