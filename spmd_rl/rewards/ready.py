"""Whether graders can work on this host with their settings; it is asked before they are used."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_rl.config.rules import require
from spmd_rl.rewards.config import GraderConfig
from spmd_rl.rewards.http import check_httpx, header_values
from spmd_rl.rewards.names import GRADERS
from spmd_rl.rewards.sandbox import check_sandbox


def check_graders(rewards: Iterable[str], cfg: GraderConfig, call_s: float) -> None:
    """Check the graders among reward functions that are named. `call_s` is `hooks.deadline_s`.

    Raises: ConfigError for a setting that is missing, or what this host lacks.
    """
    names = {short for short, full in GRADERS.items() if {short, full} & set(rewards)}
    if "code" in names:
        _check_time("code", cfg.code.deadline_s, call_s)
        check_sandbox(cfg.code)
    if "remote" in names:
        check_httpx()
        _check_time("remote", cfg.remote.deadline_s, call_s)
        require(bool(cfg.remote.url), "graders.remote.url", "", "the address of your server")
        header_values(cfg.remote.headers_from, "graders.remote.headers_from")
    if "judge" in names:
        check_httpx()
        _check_time("judge", cfg.judge.deadline_s, call_s)
        for name in ("base_url", "model"):
            value = getattr(cfg.judge, name)
            require(bool(value), f"graders.judge.{name}", value, "that of your judge's server")
        if cfg.judge.key_from:
            header_values({"Authorization": cfg.judge.key_from}, "graders.judge.key_from")


def _check_time(name: str, deadline_s: float, call_s: float) -> None:
    """Require that a grader's own deadline comes before that of all hooks; 0 is none."""
    setting = f"graders.{name}.deadline_s"
    expected = f"less than hooks.deadline_s, which is {call_s:g}"
    require(not call_s or deadline_s < call_s, setting, deadline_s, expected)
