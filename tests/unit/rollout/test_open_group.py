"""Groups in which samples have failed."""

from __future__ import annotations

import numpy as np
import pytest

from spmd_rl.hooks.context import CallInfo
from spmd_rl.rollout.engine import SamplingConfig
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


@pytest.mark.parametrize(("evaluation", "num_left"), [(False, 0), (True, 1)])
def test_a_lone_sample_counts_in_an_evaluation_alone(evaluation: bool, num_left: int) -> None:
    tokens = np.zeros(1, np.int32)
    prompt, info = Prompt(0, tokens), CallInfo(evaluation=evaluation)
    group = OpenGroup(prompt, SamplingConfig(num_samples=2), 0, info, lambda _: None)
    samples = [
        Sample(0, index, tokens, np.zeros(1, np.float32), tokens, "completed", reward=1.0)
        for index in range(2)
    ]
    group.samples.append(samples[0])
    group.fail(samples[1], "broken")
    whole = group.whole()
    assert (len(whole.samples), len(whole.failed)) == (num_left, 1)
