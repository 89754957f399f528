"""Messages between controller and worker: a closed set of types, and their headers.

A message is a msgpack header of one of these types and a value, which may be empty (codec.py).
envelope.py numbers the messages. It drops every frame that is not exactly one of these types or
exceeds the limits, and counts it under a `Refusal`. docs/wire.md has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, final

import msgspec

from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement

MAX_HEADER_BYTES = 256 << 20
MAX_COUNTS = 32
CountName = Annotated[str, msgspec.Meta(max_length=60)]


class Refusal(StrEnum):
    """Why a frame was dropped. The set is closed, so that counting takes no memory."""

    OVERSIZE = "oversize"
    PREAMBLE = "malformed preamble"
    GENERATION = "another generation"
    REPLAYED = "replayed"
    EARLY = "out of order"
    HEADER = "malformed header"
    STRANGER = "unknown identity"
    UNASKED = "unasked"


def refusals(counts: Mapping[str, int]) -> str:
    """Return the clause that says how many frames were refused and why; "" when none were."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return f"; frames refused: {reasons}" if reasons else ""


class ChannelMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. They are immutable: equal messages may be the same object."""


# From a worker to the controller.


class Hello(ChannelMessage, frozen=True):
    """The first message of a worker."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


class CommandResult(ChannelMessage, frozen=True):
    """The command returned the value of this message."""


class Failure(ChannelMessage, frozen=True):
    """The command raised `kind`; `sentence` is its text."""

    kind: str
    sentence: str
    traceback: str
    exit_code: int


class Pong(ChannelMessage, frozen=True):
    """The answer to a ping. `counts` is what the roles of this worker count now, by name."""

    counts: Annotated[dict[CountName, int], msgspec.Meta(max_length=MAX_COUNTS)] = {}


class Stacks(ChannelMessage, frozen=True):
    """What this process is doing.

    `location` is the line that the main thread is at, `text` has the stacks of all threads, and
    `refused` counts the dropped frames by reason. The payload of its value is torch's flight record
    of collectives as JSON, if there is one.
    """

    location: str
    text: str
    refused: dict[str, int]


class Signalled(ChannelMessage, frozen=True):
    """The launcher sent this worker the signal of this name; the worker goes on for a while."""

    name: str


class Dying(ChannelMessage, frozen=True):
    """This worker ends itself now, and `sentence` says why."""

    sentence: str


class Bye(ChannelMessage, frozen=True):
    """The last message of a worker that was told to stop."""


# From the controller to a worker.


class Ping(ChannelMessage, frozen=True):
    """Sent every second to a worker that said Hello.

    A worker gives up a controller that is silent for `lost_after_s`. `checkpoints` is the folder of
    the run's checkpoints: a rank that has lost its controller reads there where the run resumes.
    """

    lost_after_s: float
    checkpoints: str


class StackRequest(ChannelMessage, frozen=True):
    pass


class Command(ChannelMessage, frozen=True):
    """Base of the messages for a worker's main thread, which answers each by a CommandResult or a
    Failure, except an `Abort` and a `CallBeside`.
    """


class BuildMeshes(Command, frozen=True):
    """Build these meshes; it goes to every rank of the world.

    `traces` is the folder for the worker's spans, or "" for none. `shared` is the folder of the
    arrays that the processes of this host share, or "" for none; the answer is whether the worker
    sees it.
    """

    placements: list[Placement]
    traces: str = ""
    shared: str = ""


class Spawn(Command, frozen=True):
    """Build the role `role` ("module:qualname") as `name`.

    The value of this message is a tuple: a `cfg_type`, then the settings of the role's constructor.
    Its models have these `row_shards` (model/spec.py).
    """

    name: str
    role: str
    placement: Placement
    cfg_type: str
    row_shards: int = 1


class Call(Command, frozen=True):
    """Run an endpoint of the role named `name`; the value of this message has its arguments.

    A `concurrent` call may start while earlier ones are unanswered.
    """

    name: str
    endpoint: str
    phase: str = ""
    concurrent: bool = False


class CallBeside(Command, frozen=True):
    """Another rank, which steps together with this one, gets a `Call` of the role named `name`.

    This rank takes part in its steps until the call is answered.
    """

    name: str
    concurrent: bool = False


class Abort(Command, frozen=True):
    """End the call of this number early, if its endpoint can; the call itself answers."""


@final
class Stop(ChannelMessage, frozen=True):
    """End: in order after the earlier commands when `exit_code` is 0, else at once.

    `sentence` says why. `lost` are the workers that no longer answer: a worker that shares a
    launcher with one of them kills it.
    """

    sentence: str
    exit_code: int
    lost: list[Hello]


ToController = Hello | CommandResult | Failure | Pong | Stacks | Signalled | Dying | Bye
ToWorker = Ping | StackRequest | BuildMeshes | Spawn | Call | CallBeside | Abort | Stop

decode_at_controller = msgspec.msgpack.Decoder(ToController).decode
decode_at_worker = msgspec.msgpack.Decoder(ToWorker).decode
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # raised by decoding


_encode = msgspec.msgpack.Encoder().encode


def encode(message: ChannelMessage) -> bytes:
    """Return the header of a message.

    Raises: ContractError when the other side would refuse it as too large.
    """
    header = _encode(message)
    if len(header) > MAX_HEADER_BYTES:
        kind = type(message).__name__
        raise ContractError(
            f"a {kind} of {len(header)} bytes exceeds the wire's limit of {MAX_HEADER_BYTES}"
        )
    return header
