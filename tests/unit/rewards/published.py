"""The published checks of IFEval and IFBench, as the package if-verifiable has them."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest


def published_checks(benchmark: str) -> dict[str, Any]:
    """Return the published class of each instruction. It downloads nothing."""
    nltk = pytest.importorskip("nltk")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk, "download", lambda *_, **__: True)  # at import, of models
        if importlib.util.find_spec("datasets") is None:
            patch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=None))
        registry = pytest.importorskip(f"if_verifiable.{benchmark}.instructions_registry")
    found: dict[str, Any] = registry.INSTRUCTION_DICT
    return found
