"""Workers: the address of the controller that they find in the store, and when commands start."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.codec import NOTHING, pack
from spmd_rl.controller.channel.messages import Call, Stop
from spmd_rl.controller.deferred import Deferred
from spmd_rl.controller.endpoint import Role, collective, concurrent
from spmd_rl.controller.worker import Worker
from spmd_rl.controller.worker_process import ENDPOINT_KEY, _connect
from spmd_rl.errors import SpmdError
from spmd_rl.mesh.world import World


@pytest.mark.parametrize(
    "content",
    [
        "",
        "noise",
        "[]",
        '{"endpoint": 7, "generation": 7}',
        '{"endpoint": "nowhere", "generation": 7}',
        "\x00" * 1000,
    ],
)
def test_a_store_that_another_process_wrote_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setenv(secret.SECRET_ENV, "ab" * 32)
    store = HashStore()
    store.set(ENDPOINT_KEY, content)
    with pytest.raises(
        SpmdError, match="holds no address of the controller .*: another process writes to it"
    ):
        _connect(World(3, 4, 1, 2, 1, "run", 0), store, None)


class Slow(Role):
    """Answers `begin` in its third turn; what it runs is in `log`."""

    def __init__(self) -> None:
        super().__init__(None, SimpleNamespace(shard_size=1, shard_rank=0))  # type: ignore[arg-type]
        self.log: list[str] = []
        self.answer: Deferred[int] | None = None

    @concurrent
    @collective
    def begin(self) -> Deferred[int]:
        self.log.append("begin")
        self.answer = Deferred[int]()
        return self.answer

    @collective
    def alone(self) -> int:
        self.log.append("alone")
        return 7

    def has_work(self) -> bool:
        return self.answer is not None

    def watched(self) -> Sequence[int]:
        return ()

    def pump(self) -> None:
        self.log.append("pump")
        if self.answer and self.log.count("pump") == 3:
            self.answer.resolve(1)
            self.answer = None


class Dealer:
    """Hands out commands; it must not be waited for while there are none, until Stop."""

    def __init__(self, *endpoints: str) -> None:
        self.commands: list[Any] = [
            (Call("role", name, "", name == "begin"), pack(()), number)
            for number, name in enumerate(endpoints)
        ]
        self.answered: list[int] = []

    def next(self, answers: Sequence[Any], *, wait: bool, **how: Any) -> Any:
        self.answered += [number for _, _, number in answers]
        if self.commands:
            return [self.commands.pop(0)]
        return [(Stop("", 0, []), NOTHING, 0)] if wait else []


def test_a_command_that_was_held_back_starts_when_the_last_answer_is_there() -> None:
    role, dealer = Slow(), Dealer("begin", "alone")
    worker = Worker(SimpleNamespace(neighbours={"role": role}))  # type: ignore[arg-type]
    worker._join_turns("role", role)
    worker.serve(SimpleNamespace(dealer=dealer))  # type: ignore[arg-type]
    assert role.log == ["begin", "pump", "pump", "pump", "alone"]
    assert dealer.answered == [0, 1]
