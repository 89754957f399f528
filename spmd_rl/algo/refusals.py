"""Refusals of policy settings that do not go together, or that the algorithm does not read."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_rl.algo.config import KlConfig, PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.config.defaults import changed_defaults
from spmd_rl.config.rules import require
from spmd_rl.errors import ConfigError

# a setting without which others are not read, and those others
SWITCHES = {
    "kl.coef": ("kl.place", "kl.estimator", "kl.unbiased", "kl.reference", "kl.refresh_every"),
    "correction.mode": (
        "correction.level",
        "correction.high",
        "correction.low",
        "correction.mean_one",
    ),
    "correction.reject": ("correction.reject_high", "correction.reject_low"),
    "overlong.buffer": ("overlong.penalty",),
}


def refuse_wrong_settings(
    cfg: PolicyConfig, algorithms: Mapping[str, AlgorithmFacts], num_samples: int | None
) -> None:
    """Raises: ConfigError for the first setting that does not fit the others."""
    facts = algorithms[cfg.algorithm]
    if num_samples is not None and facts.compares_samples:
        require(num_samples >= 2, "sampling.num_samples", num_samples, "2 or more")
    keys = list(changed_defaults(cfg))
    _refuse_without_effect(keys)
    for key in keys:
        name = key.partition(".")[0]
        readers = [one for one, other in algorithms.items() if name in other.reads]
        if readers and cfg.algorithm not in readers:
            raise ConfigError(
                f"{key} is set, but algorithm = {cfg.algorithm!r} does not read it: leave it out, "
                f"or set algorithm to {' or '.join(readers)}"
            )
        if name in facts.ignores:
            raise ConfigError(
                f"{key} is set, but algorithm = {cfg.algorithm!r} does not read it: leave it out"
            )
    _refuse_correcting_twice(cfg)
    _refuse_wrong_kl(cfg.kl, facts)
    if facts.check is not None:
        facts.check(cfg)


def _refuse_without_effect(keys: list[str]) -> None:
    """Raises: ConfigError for a key that is read only where another is set, which is not."""
    for switch, others in SWITCHES.items():
        for key in others:
            if key in keys and switch not in keys:
                raise ConfigError(f"{key} has no effect without {switch}: set {switch} too")


def _refuse_correcting_twice(cfg: PolicyConfig) -> None:
    """Raises: ConfigError where the ratio against the engine would be corrected again."""
    if cfg.behaviour != "rollout" or not cfg.correction.corrects:
        return
    names = ("mode", "reject", "veto")
    settings = {name: getattr(cfg.correction, name) for name in names}
    name, value = next(item for item in settings.items() if item[1] not in ("none", 0.0))
    raise ConfigError(
        f"correction.{name} = {value!r} would correct twice: behaviour = 'rollout' takes the ratio "
        "against the engine's log-probs already; leave it out, or set behaviour = 'old'"
    )


def _refuse_wrong_kl(kl: KlConfig, facts: AlgorithmFacts) -> None:
    """Raises: ConfigError for an estimator whose gradient is not that of a divergence."""
    if not kl.coef:
        return
    if facts.place_of(kl) == "reward":
        expected = "auto or k1, because a KL divergence as a reward is k1"
        require(kl.estimator in ("auto", "k1"), "kl.estimator", kl.estimator, expected)
        expected = "false, because kl.place = 'reward' has no gradient to correct"
        require(not kl.unbiased, "kl.unbiased", kl.unbiased, expected)
        return
    if kl.estimator == "k1" and not kl.unbiased:
        raise ConfigError(
            "kl.estimator = 'k1' teaches nothing as a loss, because its expected gradient is 0: "
            "set kl.unbiased = true, kl.estimator = low_var or kl.place = reward"
        )
    if kl.estimator == "k2" and kl.unbiased:
        raise ConfigError(
            "kl.unbiased = true is right for k1 and k3, but not for kl.estimator = 'k2': "
            "set one of them"
        )
