from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

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
                status="completed" if size < 5 else "truncated",
                temperature=0.7,
                reward=reward,
            )
            for i, (reward, size) in enumerate(zip(rewards, sizes, strict=True))
        ]
        return Group(Prompt(uid, np.array([1, 2], np.int32)), samples)

    return make


@pytest.fixture
def failed() -> Callable[..., list[Sample]]:
    """Failed samples of a group, one for each error."""

    def make(*errors: str) -> list[Sample]:
        none = np.zeros(0)
        return [
            Sample(0, i, none, none, none, "failed", metadata={"error": error})  # type: ignore[arg-type]
            for i, error in enumerate(errors)
        ]

    return make
