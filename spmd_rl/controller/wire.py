"""The closed set of messages between controller and worker, and their two frames.

A message is a msgpack header and one raw payload (the bytes of all its arrays, see codec.py). Whatever is not
exactly one of these types, or exceeds the limits, is a `WireError`: the socket threads drop and count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement

MAX_HEADER_BYTES = 256 << 20
MAX_PAYLOAD_BYTES = 8 << 30


class WireError(Exception):
    """Frames that are no message of this protocol."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; `call` numbers the command that a message issues or answers."""


# From a worker to the controller.


class Hello(Message, frozen=True):
    """The first message of a worker."""

    rank: int
    host: str
    pid: int


class Result(Message, frozen=True):
    call: int
    value: msgspec.Raw


class Failure(Message, frozen=True):
    """The command raised `kind`; `sentence` is its text."""

    call: int
    kind: str
    sentence: str
    traceback: str
    exit_code: int


class Pong(Message, frozen=True):
    pass


class Stacks(Message, frozen=True):
    text: str


class Bye(Message, frozen=True):
    """The last message of a worker; `reason` is empty after an orderly stop, else what is ending it."""

    reason: str


# From the controller to a worker.


class Ping(Message, frozen=True):
    """Sent every second, from the first Hello on; a controller silent for `lost_after_s` is lost."""

    lost_after_s: float


class StackRequest(Message, frozen=True):
    pass


class Split(Message, frozen=True):
    """Build these meshes. Goes to every rank of the world."""

    call: int
    placements: list[Placement]


class Spawn(Message, frozen=True):
    """Build the role `role` ("module:qualname"), with a `cfg` of type `cfg_type`, under `name`."""

    call: int
    name: str
    role: str
    placement: Placement
    cfg_type: str
    cfg: msgspec.Raw


class Call(Message, frozen=True):
    """Run an endpoint of the role named `name`."""

    call: int
    name: str
    endpoint: str
    args: msgspec.Raw


class Stop(Message, frozen=True):
    """End, orderly after the commands before it when `exit_code` is 0, else at once and because of `sentence`."""

    sentence: str
    exit_code: int


Command = Split | Spawn | Call
Reply = Result | Failure
ToController = Hello | Result | Failure | Pong | Stacks | Bye
ToWorker = Ping | StackRequest | Split | Spawn | Call | Stop

M = TypeVar("M", bound=Message)


class _Envelope(msgspec.Struct, Generic[M], frozen=True, array_like=True, forbid_unknown_fields=True):
    """`generation` tells the messages of one life of a run from those of an earlier one."""

    generation: int
    message: M


_encoder = msgspec.msgpack.Encoder()
_to_controller = msgspec.msgpack.Decoder(_Envelope[ToController])
_to_worker = msgspec.msgpack.Decoder(_Envelope[ToWorker])


def encode(generation: int, message: Message, payload: bytes = b"") -> list[bytes]:
    """The two frames of a message.

    Raises: ContractError when it exceeds what the other side would take.
    """
    header = _encoder.encode(_Envelope(generation, message))
    if len(header) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise ContractError(
            f"a {type(message).__name__} of {len(header)} + {len(payload)} bytes exceeds the wire's limits of "
            f"{MAX_HEADER_BYTES} (header) and {MAX_PAYLOAD_BYTES} (arrays): pass less at once"
        )
    return [header, payload]


def decode_at_controller(generation: int, frames: Sequence[bytes]) -> tuple[ToController, bytes]:
    """A worker's message and its payload. Raises: WireError."""
    return _decode(_to_controller, generation, frames)


def decode_at_worker(generation: int, frames: Sequence[bytes]) -> tuple[ToWorker, bytes]:
    """A controller's message and its payload. Raises: WireError."""
    return _decode(_to_worker, generation, frames)


def _decode(
    decoder: msgspec.msgpack.Decoder[_Envelope[M]], generation: int, frames: Sequence[bytes]
) -> tuple[M, bytes]:
    if len(frames) != 2:
        raise WireError(f"{len(frames)} frames instead of 2")
    header, payload = frames
    if len(header) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"oversize frames: {len(header)} and {len(payload)} bytes")
    try:
        envelope = decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"malformed header: {error}") from error
    if envelope.generation != generation:
        raise WireError(f"generation {envelope.generation} instead of {generation}")
    return envelope.message, payload
