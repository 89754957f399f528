"""Settings of the group sampler: how far it may run ahead, and which groups a step takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spmd_rl.config.combinations import OFF, ON, Combination, above, equal, other_than, refuse
from spmd_rl.config.rules import at_least, require
from spmd_rl.hooks.config import HookConfig

ROUNDS = "with round_tokens"
REFUSED = (
    Combination(
        {"tail": other_than("keep"), "max_lag": equal(0), "oversample": equal(1.0)},
        '{0}: expected "keep" with max_lag = 0 and oversample = 1, where a step needs every group',
    ),
    Combination({"round_tokens": ON, "max_lag": equal(0)}, "{1}: expected 1 or more " + ROUNDS),
    *(
        Combination(
            {"round_tokens": ON, "oversample": size},
            "{1}: expected more than 1, and at most 2, " + ROUNDS,
        )
        for size in (equal(1.0), above(2))
    ),
    Combination({"round_tokens": ON, "tail": other_than("keep")}, '{1}: expected "keep" ' + ROUNDS),
)
# in recipes that are on-policy
ON_POLICY_REFUSED = (
    Combination(
        {"sampler.max_lag": above(0), "sampler.round_tokens": OFF},
        "{0}: expected 0, because this recipe is on-policy without {1.key} (grpo_fully_async is "
        "not)",
    ),
    # tokens would go on under newer weights as if these had drawn all
    Combination(
        {"sampler.round_tokens": ON, "behaviour": equal("old"), "correction.corrects": OFF},
        '{0.key} with {1.key} = "{1.value}": tokens of earlier steps would pass for those of the '
        'present weights; set behaviour = "rollout", or a correction.mode',
    ),
)
# in recipes that generate without a pause
UNPAUSED_REFUSED = (
    Combination(
        {"sampler.round_tokens": ON},
        "{0}: expected 0, because this recipe generates without a pause: samples go on anyhow",
    ),
)
# in recipes that generate without a sampler
UNSAMPLED_REFUSED = tuple(
    Combination(
        {key: ON},
        "{0.key} is set, but this recipe generates without a sampler: leave it out, or run grpo or "
        "grpo_fully_async",
    )
    for key in ("sampler", "hooks.keep_group")
)


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
        refuse(REFUSED, self)


def refuse_sampler(cfg: SamplerConfig, hooks: HookConfig) -> None:
    """Raise a ConfigError where a sampler is set up, for recipes that generate without one."""
    refuse(UNSAMPLED_REFUSED, {"sampler": cfg if cfg != SamplerConfig() else None, "hooks": hooks})
