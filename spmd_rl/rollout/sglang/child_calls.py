"""Names of the methods that the child adds to SGLang's scheduler, for calls by its rank.

`CALLS` is the table of all such methods. A module may add one before the child starts: a function
of the scheduler's context and of values that are no containers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spmd_rl.weights.slab.peer_socket import PeerSocket

PREFIX = "spmd_"
ATTACH = "spmd_attach_slab"
RECEIVE = "spmd_receive_weights"
DIGEST = "spmd_digest_weights"
SETTLE = "spmd_settle"


# calls that the sinks of all ranks of a group wait for
OF_SINKS = (ATTACH, RECEIVE, DIGEST)


@dataclass
class ChildContext:
    """What a call may use: the scheduler, the socket to the rank, and values kept between calls."""

    scheduler: Any
    socket: PeerSocket
    kept: dict[str, Any]

    @property
    def model(self) -> Any:
        """SGLang's model."""
        return self.scheduler.tp_worker.model_runner.model


Call = Callable[..., None]
CALLS: dict[str, Call] = {}


def call(name: str) -> Callable[[Call], Call]:
    """Add a function to the methods that a rank can call in its child."""

    def add(function: Call) -> Call:
        CALLS[name] = function
        return function

    return add


@call(SETTLE)
def settle(context: ChildContext) -> None:
    """Do nothing. SGLang answers once all schedulers of the group have come here."""
