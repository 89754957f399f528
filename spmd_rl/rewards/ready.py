"""Whether graders can work on this host with their settings; it is asked before they are used.

What only one grader needs is imported where it is checked, because every process of hooks asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from spmd_rl.config.rules import require
from spmd_rl.rewards.names import GRADERS

if TYPE_CHECKING:
    from spmd_rl.rewards.config import CodeConfig, GraderConfig, JudgeConfig, RemoteConfig

CHECKED = ("code", "remote", "judge")


def checked_graders(rewards: Iterable[str]) -> set[str]:
    """Return the short names of those graders among reward functions that need a check."""
    named = set(rewards)
    return {short for short in CHECKED if {short, GRADERS[short]} & named}


def check_graders(names: Iterable[str], cfg: GraderConfig, call_s: float) -> None:
    """Check graders by their short names. `call_s` is `hooks.deadline_s`; 0: none.

    Raises: ConfigError for a setting that is missing, or what this host lacks.
    """
    for name in names:
        settings: CodeConfig | RemoteConfig | JudgeConfig = getattr(cfg, name)
        expected = f"less than hooks.deadline_s, which is {call_s:g}"
        is_less = not call_s or settings.deadline_s < call_s
        require(is_less, f"graders.{name}.deadline_s", settings.deadline_s, expected)
    if "code" in names:
        from spmd_rl.rewards.code.sandbox import check_sandbox

        check_sandbox(cfg.code)
    if "remote" in names:
        require(bool(cfg.remote.url), "graders.remote.url", "", "the address of your server")
        _check_client("headers_from", "remote", cfg.remote.headers_from)
    if "judge" in names:
        for name in ("base_url", "model"):
            value = getattr(cfg.judge, name)
            require(bool(value), f"graders.judge.{name}", value, "that of your judge's server")
        key = {"Authorization": cfg.judge.key_from} if cfg.judge.key_from else {}
        _check_client("key_from", "judge", key)


def _check_client(setting: str, name: str, variables: dict[str, str]) -> None:
    from spmd_rl.rewards.remote.http import check_httpx, header_values

    check_httpx()
    header_values(variables, f"graders.{name}.{setting}")
