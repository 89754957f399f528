"""Hooks of one process, once they are imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.hooks.context import CallInfo, HookContext
from spmd_rl.hooks.signatures import RewardFunction, load_generate, load_reward
from spmd_rl.hooks.wire.messages import Start
from spmd_rl.rewards.ready import check_graders, checked_graders


@dataclass(frozen=True)
class LoadedHooks:
    """The functions, and the recipe's config, which they find in their context."""

    rewards: list[RewardFunction]
    generate: Callable[..., Any] | None
    config: Mapping[str, Any]

    @staticmethod
    def of(start: Start) -> LoadedHooks:
        """Import the hooks. Raises: ConfigError when one cannot be used."""
        rewards = [load_reward(name) for name in start.rewards]
        if names := checked_graders(start.rewards):
            from spmd_rl.rewards.config import graders_of  # most hooks do not need it

            call_s = start.config.get("hooks", {}).get("deadline_s", 0)
            check_graders(names, graders_of(start.config), call_s)
        generate = load_generate(start.generate) if start.generate else None
        return LoadedHooks(rewards, generate, start.config)

    def context(self, info: CallInfo, prompt_uid: int, sample_index: int) -> HookContext:
        """Return the context of one call."""
        step, version, evaluation, seed = info.step, info.version, info.evaluation, info.seed
        return HookContext(self.config, step, version, evaluation, seed, prompt_uid, sample_index)
