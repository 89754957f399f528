"""Kernels that no GPU has run yet: a run refuses them, and tests/gpu does not."""

from __future__ import annotations

from spmd_rl.errors import ConfigError

are_allowed = False


def refuse_unproven(what: str) -> None:
    """Raises: ConfigError naming `what` the kernels are for, outside of tests/gpu."""
    if not are_allowed:
        raise ConfigError(f"{what}: no GPU has run its kernels yet")
