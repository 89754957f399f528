"""Marks of every test that needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd_rl.kernels import unproven


@pytest.fixture(autouse=True, scope="session")
def _runs_unproven_kernels() -> None:
    unproven.are_allowed = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))
