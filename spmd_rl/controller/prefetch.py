"""Calls issued before their values are needed: what lets a loop run ahead of itself, and still
resume where it was.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

import msgspec

from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.endpoint import Bound, Signature
from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ConfigError, ContractError

P = ParamSpec("P")
R = TypeVar("R")

VALUES_FILE = "values.msgpack"


class CallQueue(Generic[P, R]):
    """Calls of one endpoint, first in, first out; its length is how many are still to be waited
    for.

    Named as a part in `Controller.resume`, it is in every checkpoint with the values of those
    calls: what made them (the weights of that moment, say) may be gone by the time of a resume.
    """

    def __init__(self, endpoint: Bound[P, R]) -> None:
        self._endpoint = endpoint
        self._returns = Signature(endpoint._endpoint).result
        self._calls: deque[Pending[R]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Issue one more call and go on."""
        self._calls.append(self._endpoint.start(*args, **kwargs))

    def wait(self) -> R:
        """The value of the oldest call, which leaves the queue.

        Blocks and raises: as `Pending.wait`.
        """
        return self._calls.popleft().wait()

    def save(self, folder: str) -> None:
        """Write the value of every call. Blocks: until all are finished."""
        values = [self._returns.pack(call.wait()) for call in self._calls]
        Path(folder).mkdir(parents=True)
        (Path(folder) / VALUES_FILE).write_bytes(msgspec.msgpack.encode(values))

    def load(self, folder: str) -> None:
        """Hold the saved values, as if their calls had just finished.

        Raises: ConfigError when they are the values of other calls.
        """
        path = Path(folder) / VALUES_FILE
        try:
            values = msgspec.msgpack.decode(path.read_bytes(), type=list[Packed])
            self._calls = deque(_finished(self._returns.unpack(value)) for value in values)
        except (OSError, msgspec.MsgspecError, ContractError) as error:
            raise ConfigError(
                f"{path} does not hold what this recipe would have saved: {error}"
            ) from error


def _finished(value: R) -> Pending[R]:
    return Pending(lambda deadline_s: value)
