"""Runs of tests are forked from a process that has imported what they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.dist.launched import PRELOADED, Launched

pytestmark = pytest.mark.dist
LIMIT_S = 600.0
DRAWS = "spmd_rl.report.pictures.curves"  # of which most runs of tests have one that draws nothing


def print_missing(words: list[str]) -> int:
    print([name for name in PRELOADED if name not in sys.modules], DRAWS in sys.modules)
    return 0


def test_all_is_imported_before_the_fork(tmp_path: Path) -> None:
    """The process that imports it says nothing of a module that it does not find."""
    run = Launched([], tmp_path, dict(os.environ), print_missing)
    try:
        assert run.communicate(LIMIT_S) == ("[] False\n", "")
    finally:
        run.end()
