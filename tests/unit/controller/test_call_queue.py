"""Calls issued before their values are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.controller.call_queue import VALUES_FILE, CallQueue
from spmd_rl.controller.endpoint import BoundEndpoint, Role, Sharded, collective
from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ConfigError
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class Speaker(Role):
    @collective
    def say(self, prompts: Sharded[list[Prompt]], version: int) -> Sharded[list[Group]]:
        return [Group(prompt, [sample(prompt.uid, version)]) for prompt in prompts]


class LocalEndpoint(BoundEndpoint[..., Any]):
    """An endpoint whose calls are finished when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(Speaker.say, Speaker(None, None))
        self.num_waits = 0

    def start(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        def finish(deadline_s: float | None) -> Any:
            self.num_waits += 1
            return self(*args, **kwargs)

        return Pending(finish)


def sample(uid: int, version: int) -> Sample:
    tokens = np.arange(uid + 1, dtype=np.int32)
    logprobs = np.array([-0.1] * len(tokens), np.float32)
    versions = np.full_like(tokens, version)
    return Sample(
        uid, 0, tokens, logprobs, versions, "completed", text="é", parts={"a": 0.1}, kept=b"\5\0"
    )


def prompt(uid: int) -> Prompt:
    return Prompt(uid, np.array([7, uid], np.int32), "7", meta={"line": uid})


def same(one: list[Group], other: list[Group]) -> bool:
    """Equal in type and bits, NaN rewards included."""
    return [_flat(group) for group in one] == [_flat(group) for group in other]


def _flat(group: Group) -> list[Any]:
    values = [
        *vars(group.prompt).values(),
        *(value for item in group.samples for value in vars(item).values()),
    ]
    return [(v.dtype.name, v.tobytes()) if isinstance(v, np.ndarray) else repr(v) for v in values]


def test_first_in_first_out() -> None:
    ahead = CallQueue(LocalEndpoint())
    assert not ahead
    ahead.start([prompt(1)], version=3)
    ahead.start([prompt(2)], 4)
    assert len(ahead) == 2
    assert [ahead.wait()[0].prompt.uid, ahead.wait()[0].prompt.uid] == [1, 2]
    assert not ahead


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    here = LocalEndpoint()
    ahead, again = CallQueue(here), CallQueue(LocalEndpoint())
    ahead.start([prompt(1), prompt(2)], 3)
    ahead.start([prompt(4)], 4)
    ahead.save(str(tmp_path / "ahead"))
    assert here.num_waits == 2
    again.load(str(tmp_path / "ahead"))
    assert len(again) == len(ahead) == 2
    assert same(again.wait(), ahead.wait())
    first, second = again.wait(), ahead.wait()
    assert same(first, second)
    assert not same(first, [])
    assert here.num_waits == 2, "a call is waited for once, whether saved or not"


@pytest.mark.parametrize(
    "data", [b"", b"\x91\x01", b"\x91\x82\xa4body\xc4\x01\x01\xa7payload\xc4\x00"]
)
def test_what_is_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / VALUES_FILE).write_bytes(data)
    with pytest.raises(ConfigError, match="does not hold what this recipe would have saved"):
        CallQueue(LocalEndpoint()).load(str(tmp_path))
