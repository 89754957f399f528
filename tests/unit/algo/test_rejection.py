"""Which samples rejection sampling accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd_rl.algo.policy.rejection import accepted_samples
from spmd_rl.errors import ConfigError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


def group(*samples: tuple[str, float, str]) -> Group:
    none = np.zeros(0)
    made = [
        Sample(0, i, none, none, none, status, text=text, reward=reward)  # type: ignore[arg-type]
        for i, (text, reward, status) in enumerate(samples)
    ]
    return Group(Prompt(0, np.zeros(1, np.int32)), made)


SAMPLES = group(
    ("a", 1.0, "completed"),
    ("b", 0.5, "completed"),
    ("a", 1.0, "completed"),
    ("c", 3.0, "truncated"),
    ("d", 2.0, "completed"),
    ("e", 2.0, "completed"),
)


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({}, "ade"),
        ({"threshold": 0.5}, "abde"),
        ({"threshold": 2.5}, ""),
        ({"keep": "best"}, "d"),
        ({"keep": "best", "threshold": 2.5}, ""),
    ],
    ids=str,
)
def test_accepted_samples(settings: dict[str, Any], texts: str) -> None:
    assert "".join(sample.text for sample in accepted_samples(SAMPLES, **settings)) == texts


def test_of_equal_texts_the_first_is_accepted() -> None:
    assert [sample.index for sample in accepted_samples(SAMPLES)] == [0, 4, 5]


def test_another_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="best or correct"):
        accepted_samples(SAMPLES, keep="worst")  # type: ignore[arg-type]
