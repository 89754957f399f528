"""Queue of calls that a loop issues before it needs their values, which a checkpoint can hold."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

import msgspec

from spmd_rl.controller.channel.codec import Packed
from spmd_rl.controller.endpoint import BoundEndpoint, Signature
from spmd_rl.controller.pending import Pending
from spmd_rl.errors import ConfigError, ContractError

P = ParamSpec("P")
R = TypeVar("R")

VALUES_FILE = "values.msgpack"


class CallQueue(Generic[P, R]):
    """Calls of one endpoint, first in, first out; its length is the number of values not yet taken.

    As a part in `Controller.resume`, it saves the values of its calls in every checkpoint. A
    resumed run cannot compute them again, because the weights that they came from may be gone.
    """

    def __init__(self, endpoint: BoundEndpoint[P, R]) -> None:
        self._endpoint = endpoint
        self._returns = Signature(endpoint._endpoint).result
        self._calls: deque[Pending[R]] = deque()

    def __len__(self) -> int:
        return len(self._calls)

    def start(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Issue one more call, and return at once."""
        self._calls.append(self._endpoint.start(*args, **kwargs))

    def wait(self) -> R:
        """Remove the oldest call from the queue and return its value.

        Blocks and raises: as `Pending.wait`.
        """
        return self._calls.popleft().wait()

    def save(self, folder: str) -> None:
        """Write the value of every call. Blocks: until all are finished."""
        values = [self._returns.pack(call.wait()) for call in self._calls]
        Path(folder).mkdir(parents=True)
        (Path(folder) / VALUES_FILE).write_bytes(msgspec.msgpack.encode(values))

    def load(self, folder: str) -> None:
        """Fill the queue with the saved values, as if their calls had just finished.

        Raises: ConfigError when they are the values of another endpoint.
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
