"""Refusals of policy settings that do not go together, or that the algorithm does not read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spmd_rl.algo.config import PolicyConfig
from spmd_rl.algo.facts import AlgorithmFacts
from spmd_rl.config.combinations import (
    ANY,
    OFF,
    ON,
    Combination,
    above,
    compared,
    equal,
    other_than,
    refuse,
)
from spmd_rl.config.defaults import changed_defaults

WITHOUT_EFFECT = tuple(
    Combination({key: ON, switch: OFF}, "{0.key} has no effect without {1.key}: set {1.key} too")
    for switch, keys in {
        "kl.coef": ("kl.place", "kl.estimator", "kl.unbiased", "kl.reference", "kl.refresh_every"),
        "correction.mode": (
            "correction.level",
            "correction.high",
            "correction.low",
            "correction.mean_one",
        ),
        "correction.reject": ("correction.reject_high", "correction.reject_low"),
        "overlong.buffer": ("overlong.penalty",),
    }.items()
    for key in keys
)
K1_REWARD = {"kl.coef": ON, "kl.place": equal("reward")}
REFUSED = (
    *(
        Combination(
            {"behaviour": equal("rollout"), f"correction.{name}": corrects},
            "{1} would correct twice: {0} takes the ratio against the engine's log-probs already; "
            "leave it out, or set {0.key} = 'old'",
        )
        for name, corrects in (
            ("mode", other_than("none")),
            ("reject", other_than("none")),
            ("veto", above(0)),
        )
    ),
    Combination(
        K1_REWARD | {"kl.estimator": other_than("auto", "k1")},
        "{2}: expected auto or k1, because a KL divergence as a reward is k1",
    ),
    Combination(
        K1_REWARD | {"kl.unbiased": ON},
        "{2}: expected false, because {1} has no gradient to correct",
    ),
    Combination(
        {
            "kl.estimator": equal("k1"),
            "kl.coef": ON,
            "kl.place": equal("loss"),
            "kl.unbiased": OFF,
        },
        "{0} teaches nothing as a loss, because its expected gradient is 0: set kl.unbiased = "
        "true, kl.estimator = low_var or kl.place = reward",
    ),
    Combination(
        {
            "kl.estimator": equal("k2"),
            "kl.coef": ON,
            "kl.place": equal("loss"),
            "kl.unbiased": ON,
        },
        "{3.key} = true is right for k1 and k3, but not for {0}: set one of them",
    ),
)
LONG_BUFFER = Combination(
    {
        "overlong.buffer": compared("no less than", "sampling.max_tokens", operator.ge),
        "sampling.max_tokens": ANY,
    },
    "{0}: expected less than {1}",
)


def of_algorithms(algorithms: Mapping[str, AlgorithmFacts]) -> Iterator[Combination]:
    """Yield a row for each setting that some of the algorithms do not read, and one for those that
    compare the samples of a prompt.

    The value of a setting is the key, in its table, that is not as by default.
    """
    compare = [key for key, facts in algorithms.items() if facts.compares_samples]
    yield Combination(
        {"sampling.num_samples": equal(1), "algorithm": equal(*compare)}, "{0}: expected 2 or more"
    )
    says = "{0.value} is set, but {1} does not read it: leave it out"
    for name in dict.fromkeys(name for facts in algorithms.values() for name in facts.reads):
        readers = [key for key, facts in algorithms.items() if name in facts.reads]
        advice = f", or set algorithm to {' or '.join(readers)}"
        yield Combination({name: ON, "algorithm": other_than(*readers)}, says + advice)
    for key, facts in algorithms.items():
        for name in facts.ignores:
            yield Combination({name: ON, "algorithm": equal(key)}, says)


def refuse_wrong_settings(
    cfg: PolicyConfig, facts: AlgorithmFacts, rows: Iterable[Combination], num_samples: int | None
) -> None:
    """Raises: ConfigError for the first setting that does not fit the others.

    `rows` are those of the algorithms, and `facts` those of the chosen one.
    """
    keys = list(changed_defaults(cfg))
    refuse(WITHOUT_EFFECT, {key: key in keys for row in WITHOUT_EFFECT for key in row.when})
    names: dict[str, Any] = {key.partition(".")[0]: key for key in reversed(keys)}
    names |= {"algorithm": cfg.algorithm}
    refuse(rows, names | ({} if num_samples is None else {"sampling.num_samples": num_samples}))
    settings = {"behaviour": cfg.behaviour, "correction": cfg.correction, "kl": cfg.kl}
    refuse(REFUSED, settings | {"kl.place": facts.place_of(cfg.kl)})
    if facts.check is not None:
        facts.check(cfg)
