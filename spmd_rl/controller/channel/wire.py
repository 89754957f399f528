"""The closed set of messages between controller and worker, and their headers.

A message is a msgpack header of one of these types, and the value that goes with it, if any
(codec.py); envelope.py numbers them. Whatever is not exactly one of these types, or exceeds the
limits, is dropped and counted there, by its `Refusal`. docs/wire.md is the table of all this.
"""

from __future__ import annotations

from enum import StrEnum
from typing import final

import msgspec

from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement

MAX_HEADER_BYTES = 256 << 20


class Refusal(StrEnum):
    """Why frames were dropped: all there is, so that counting them takes no memory."""

    OVERSIZE = "oversize"
    PREAMBLE = "malformed preamble"
    GENERATION = "another generation"
    REPLAYED = "replayed"
    EARLY = "out of order"
    HEADER = "malformed header"
    STRANGER = "unknown identity"
    UNASKED = "unasked"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages. Nobody changes one: messages that are equal may be one object."""


# From a worker to the controller.


class Hello(Message, frozen=True):
    """The first message of a worker."""

    rank: int
    host: str
    pid: int


class Result(Message, frozen=True):
    """The command returned the value of this message."""


class Failure(Message, frozen=True):
    """The command raised `kind`; `sentence` is its text."""

    kind: str
    sentence: str
    traceback: str
    exit_code: int


class Pong(Message, frozen=True):
    pass


class Stacks(Message, frozen=True):
    """Where this process is: `place` in one line, every thread's stack, and how many frames it
    refused, by reason.

    The payload of its value is torch's flight record of collectives, as JSON, where there is one.
    """

    place: str
    text: str
    refused: dict[str, int]


class Signalled(Message, frozen=True):
    """The launcher is ending this worker, by the signal of this name; it stays for a while."""

    name: str


class Dying(Message, frozen=True):
    """This worker ends itself now, because of `sentence`."""

    sentence: str


class Bye(Message, frozen=True):
    """The last message of a worker that was told to stop."""


# From the controller to a worker.


class Ping(Message, frozen=True):
    """Sent every second, from the first Hello on; a controller silent for `lost_after_s` is lost.

    `checkpoints` is the folder of the run's checkpoints, from which a rank without a controller
    sees where it goes on.
    """

    lost_after_s: float
    checkpoints: str


class StackRequest(Message, frozen=True):
    pass


class Command(Message, frozen=True):
    """A message that is answered, by a Result or a Failure, in its turn."""


class Split(Command, frozen=True):
    """Build these meshes. Goes to every rank of the world. `traces` is the folder for its spans, ""
    for none.
    """

    placements: list[Placement]
    traces: str = ""


class Spawn(Command, frozen=True):
    """Build the role `role` ("module:qualname") as `name`.

    The value of this message is a tuple: a `cfg_type`, then the settings of the role's constructor.
    """

    name: str
    role: str
    placement: Placement
    cfg_type: str


class Call(Command, frozen=True):
    """Run an endpoint of the role named `name`, with the arguments that are this message's value."""

    name: str
    endpoint: str
    phase: str = ""


@final
class Stop(Message, frozen=True):
    """End, orderly after the commands before it when `exit_code` is 0, else at once and because of
    `sentence`.

    `lost` are the workers that answer no more: whoever shares a launcher with one ends it too.
    """

    sentence: str
    exit_code: int
    lost: list[Hello]


Reply = Result | Failure
ToController = Hello | Result | Failure | Pong | Stacks | Signalled | Dying | Bye
ToWorker = Ping | StackRequest | Split | Spawn | Call | Stop

decode_at_controller = msgspec.msgpack.Decoder(ToController).decode
decode_at_worker = msgspec.msgpack.Decoder(ToWorker).decode
MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)  # what decoding raises


_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> bytes:
    """The header of a message. Raises: ContractError when it exceeds what the other side would
    take.
    """
    header = _encode(message)
    if len(header) > MAX_HEADER_BYTES:
        kind = type(message).__name__
        raise ContractError(
            f"a {kind} of {len(header)} bytes exceeds the wire's limit of {MAX_HEADER_BYTES}"
        )
    return header
