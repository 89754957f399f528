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
    # tokens that a sample draws in a round. A step ends after a round that leaves it enough whole
    # groups, and the others go on in the next step, under newer weights; 0: no rounds
    round_tokens: int = 0
    # how many times as many groups as are needed may be generated for one step, before too many
    # were rejected; 0: any number
    max_gen_batches: int = 20
    # what follows then; stop: the run ends as after its last step, with exit code 0; train: the
    # step learns from the groups that there are, if there is one; error: the run fails
    when_short: Literal["stop", "train", "error"] = "stop"

    def __post_init__(self) -> None:
        least = {"max_lag": 0, "max_running": 0, "round_tokens": 0, "max_gen_batches": 0}
        at_least(self, least | {"oversample": 1})
        require(self.oversample <= 100, "oversample", self.oversample, "at most 100")
        has_more = self.tail == "keep" or self.max_lag > 0 or self.oversample > 1
        expected = '"keep" with max_lag = 0 and oversample = 1, where a step needs every group'
        require(has_more, "tail", self.tail, expected)
        if self.round_tokens:
            self._check_rounds()

    def _check_rounds(self) -> None:
        """Raises: ConfigError for settings with which no sample could go on in another step."""
        why = "with round_tokens"
        require(self.max_lag >= 1, "max_lag", self.max_lag, f"1 or more {why}")
        expected = f"more than 1, and at most 2, {why}"
        require(1 < self.oversample <= 2, "oversample", self.oversample, expected)
        require(self.tail == "keep", "tail", self.tail, f'"keep" {why}')


def refuse_lag(cfg: SamplerConfig) -> None:
    """Raise a ConfigError where samples may be older than the weights, for on-policy recipes."""
    expected = "0, because this recipe is on-policy without sampler.round_tokens"
    is_fresh = cfg.max_lag == 0 or cfg.round_tokens > 0
    require(is_fresh, "sampler.max_lag", cfg.max_lag, f"{expected} (grpo_fully_async is not)")


def refuse_rounds(cfg: SamplerConfig) -> None:
    """Raise a ConfigError for rounds, for recipes whose engines generate without a pause."""
    expected = "0, because this recipe generates without a pause: samples go on anyhow"
    require(cfg.round_tokens == 0, "sampler.round_tokens", cfg.round_tokens, expected)


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
