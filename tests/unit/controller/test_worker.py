"""Workers: the address of the controller that they find in the store."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from spmd_rl.controller.channel import secret
from spmd_rl.controller.worker import ENDPOINT_KEY, _connect
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
