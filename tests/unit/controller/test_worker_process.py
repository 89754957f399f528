"""A rank that fails while it joins lets the controller say why, if it knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spmd_rl.controller import worker_process
from spmd_rl.controller.lifecycle.deadlines import DEATH_NEWS_S
from spmd_rl.controller.lifecycle.shutdown import FinalMessage
from spmd_rl.errors import SpmdError


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection reset by peer"), [DEATH_NEWS_S]),
        (SpmdError("another process has taken the place of rank 1"), []),
    ],
)
def test_news_of_a_death_is_awaited_where_a_connection_has_ended(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: list[float]
) -> None:
    waited: list[float] = []
    lifecycle = SimpleNamespace(
        await_end=waited.append, final_message=FinalMessage(), checkpoints=""
    )

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(worker_process, "open_store", lambda world: None)
    monkeypatch.setattr(worker_process, "_connect", lambda *_: lifecycle)
    monkeypatch.setattr(worker_process, "join", lambda *_: None)
    monkeypatch.setattr(worker_process, "prove", fail)
    with pytest.raises(type(error)):
        worker_process.run_worker(SimpleNamespace(device="cpu"), None)  # type: ignore[arg-type]
    assert waited == expected
