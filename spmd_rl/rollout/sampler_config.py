"""Settings of the group sampler: how far it may run ahead, and which groups a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.rules import at_least, require
from spmd_rl.errors import ConfigError
from spmd_rl.hooks.config import HookConfig


@dataclass(frozen=True)
class SamplerConfig:
    """How many groups are generated at a time, how old they may get, and which a step takes."""

    # how many weight versions a token may be behind the trainer
    max_lag: int = 0
    max_running: int = 0  # groups in generation at once; 0: as many as max_lag allows
    # how many times as many groups are generated as are needed; what is left over at a step's end
    # goes back to the data
    oversample: float = 1.0
    # of groups that are still in generation when enough later ones have ended; keep: the step waits
    # for them; abort: it does not, and they end when max_lag is reached
    tail: Literal["keep", "abort"] = "keep"
    # how many times as many groups as are needed may be generated for one step, before too many
    # were rejected; 0: any number
    max_gen_batches: int = 20
    # what follows then; stop: the run ends as after its last step, with exit code 0; train: the
    # step learns from the groups that there are, if there is one; error: the run fails
    when_short: Literal["stop", "train", "error"] = "stop"

    def __post_init__(self) -> None:
        at_least(self, {"max_lag": 0, "max_running": 0, "oversample": 1, "max_gen_batches": 0})
        require(self.oversample <= 100, "oversample", self.oversample, "at most 100")
        has_more = self.tail == "keep" or self.max_lag > 0 or self.oversample > 1
        expected = '"keep" with max_lag = 0 and oversample = 1, where a step needs every group'
        require(has_more, "tail", self.tail, expected)


def refuse_lag(cfg: SamplerConfig) -> None:
    """Raise a ConfigError where samples may be older than the weights, for on-policy recipes."""
    expected = "0, because this recipe is on-policy (grpo_fully_async is not)"
    require(cfg.max_lag == 0, "sampler.max_lag", cfg.max_lag, expected)


def refuse_sampler(cfg: SamplerConfig, hooks: HookConfig) -> None:
    """Raise a ConfigError where a sampler is set up, for recipes that generate without one."""
    for name, is_set in (
        ("sampler", cfg != SamplerConfig()),
        ("hooks.keep_group", bool(hooks.keep_group)),
    ):
        if is_set:
            raise ConfigError(
                f"{name} is set, but this recipe generates without a sampler: leave it out, "
                "or run grpo or grpo_fully_async"
            )
