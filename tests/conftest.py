"""Marks that decide what runs where: `gpu` tests are left out on a machine without one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, register_random, settings


class TorchRandom:
    """The generator of torch: Hypothesis sets it before each example, and so can repeat it."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH_RANDOM = TorchRandom()  # Hypothesis keeps a weak reference
register_random(TORCH_RANDOM)

# How long an example takes says more of the machine, and of who else uses it, than of the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


def _has_gpu() -> bool:
    return torch.cuda.is_available()
