"""`spmd-rl plan`: what a run would be, for any world, without a GPU, a rank or torch."""

from __future__ import annotations

from spmd_rl.plan.command import main

__all__ = ["main"]
