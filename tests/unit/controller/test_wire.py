from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.controller import wire
from spmd_rl.controller.wire import WireError, decode_at_controller, decode_at_worker, encode
from spmd_rl.errors import ContractError
from spmd_rl.mesh.split import Placement

RAW = msgspec.Raw(msgspec.msgpack.encode({"a": [1, 2.5, "x"]}))
PLACEMENT = Placement("actor", (0, 1), {"dp": 1, "fsdp": 2, "tp": 1})
TO_CONTROLLER = [
    wire.Hello(3, "host", 77),
    wire.Result(5, RAW),
    wire.Failure(5, "KeyError", "'x'", "Traceback", 1),
    wire.Pong(),
    wire.Stacks("thread"),
    wire.Bye("SIGTERM"),
]
TO_WORKER = [
    wire.Ping(20.0),
    wire.StackRequest(),
    wire.Split(1, [PLACEMENT]),
    wire.Spawn(2, "actor", "m:Actor", PLACEMENT, "m:Config", RAW),
    wire.Call(3, "actor", "go", RAW),
    wire.Stop("why", 2),
]


def same(a: wire.Message, b: wire.Message) -> bool:
    return type(a) is type(b) and msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


@pytest.mark.parametrize("message", TO_CONTROLLER)
def test_round_trip_to_the_controller(message: wire.Message) -> None:
    decoded, payload = decode_at_controller(7, encode(7, message, b"raw"))
    assert same(decoded, message)
    assert payload == b"raw"


@pytest.mark.parametrize("message", TO_WORKER)
def test_round_trip_to_a_worker(message: wire.Message) -> None:
    assert same(decode_at_worker(7, encode(7, message))[0], message)


@pytest.mark.parametrize("message", TO_WORKER)
def test_the_controller_takes_no_workers_orders(message: wire.Message) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_at_controller(7, encode(7, message))


def test_other_generations_are_refused() -> None:
    with pytest.raises(WireError, match="generation 6 instead of 7"):
        decode_at_controller(7, encode(6, wire.Pong()))


def test_wrong_frame_counts_and_unknown_fields_are_refused() -> None:
    header, payload = encode(7, wire.Pong())
    for frames in ([], [header], [header, payload, payload]):
        with pytest.raises(WireError, match="frames"):
            decode_at_controller(7, frames)
    with pytest.raises(WireError, match="malformed"):
        decode_at_controller(7, [msgspec.msgpack.encode([7, {"type": "Pong", "extra": 1}]), b""])


def test_oversize_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = encode(7, wire.Stacks("x" * 100), b"y" * 100)
    for limit in ("MAX_HEADER_BYTES", "MAX_PAYLOAD_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(wire, limit, 64)
            with pytest.raises(WireError, match="oversize"):
                decode_at_controller(7, frames)
            with pytest.raises(ContractError, match="exceeds the wire's limits"):
                encode(7, wire.Stacks("x" * 100), b"y" * 100)


@given(st.sampled_from(TO_CONTROLLER), st.data())
def test_mutated_frames_never_crash(message: wire.Message, data: st.DataObject) -> None:
    header = bytearray(encode(7, message)[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded, _ = decode_at_controller(7, [bytes(header), b""])
    except WireError:
        return
    assert isinstance(decoded, wire.Message)


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_noise_never_crashes(header: bytes, payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_at_worker(7, [header, payload])
