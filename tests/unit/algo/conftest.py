from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Group, Sample

MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group() -> MakeGroup:
    """A group from its rewards; sample i has `lengths[i]` tokens, all made by `version`."""

    def make(
        rewards: Sequence[float],
        uid: int = 0,
        lengths: Sequence[int] | None = None,
        version: int = 0,
    ) -> Group:
        sizes = lengths or [3] * len(rewards)
        samples = [
            Sample(
                prompt_uid=uid,
                index=i,
                tokens=np.arange(10, 10 + size, dtype=np.int32),
                logprobs=np.linspace(-2, -1, size).astype(np.float32),
                versions=np.full(size, version, np.int32),
                finish="stop" if size < 5 else "length",
                temperature=0.7,
                reward=reward,
            )
            for i, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
        ]
        return Group(Prompt(uid, np.array([1, 2], np.int32)), samples)

    return make
