"""Rewards from a model reach the sample that they judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spmd_rl.algo.sample_rewards import pack_samples, with_rewards
from spmd_rl.errors import ContractError


def test_each_sample_gets_its_reward(make_group: Any) -> None:
    groups = [make_group([0, 0, 0], uid=0), make_group([], uid=1), make_group([0, 0], uid=2)]
    batch = pack_samples(groups)
    assert batch.num_sequences == 5
    assert not batch.advantages.any()
    judged = with_rewards(groups, np.arange(5, dtype=np.float32))
    assert [group.rewards.tolist() for group in judged] == [[0, 1, 2], [], [3, 4]]
    assert not any(group.rewards.any() for group in groups)
    with pytest.raises(ContractError, match="4 rewards for 5 samples"):
        with_rewards(groups, np.zeros(4))
