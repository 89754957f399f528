from __future__ import annotations

from types import ModuleType

import pytest

from spmd_rl.controller import codec, wire
from spmd_rl.controller.codec import NOTHING, Packed
from spmd_rl.controller.envelope import OWN_FRAME_BYTES, PREAMBLE, Incoming, Outgoing
from spmd_rl.controller.known import MAX_KNOWN, MAX_KNOWN_BYTES

VALUE = Packed(b"body", b"payload")


def taker(generation: int = 7) -> Incoming[bytes]:
    return Incoming(generation, lambda header: header)


def sent(count: int, generation: int = 7) -> list[list[bytes]]:
    outgoing = Outgoing(generation)
    return [outgoing.frames(b"header %d" % number, VALUE, number + 5) for number in range(count)]


def test_messages_pass_in_order() -> None:
    incoming = taker()
    expected = [(b"header %d" % number, VALUE, number + 5) for number in range(3)]
    assert [incoming.take(frames) for frames in sent(3)] == expected
    assert not incoming.refused


def test_a_large_payload_has_a_frame_of_its_own() -> None:
    outgoing, incoming = Outgoing(7), taker()
    sizes = (OWN_FRAME_BYTES - 1, OWN_FRAME_BYTES)
    for num_frames, size in zip((1, 2), sizes, strict=True):
        value = Packed(b"body", bytes(size))
        frames = outgoing.frames(b"header", value)
        assert len(frames) == num_frames
        assert incoming.take(frames) == (b"header", value, 0)


def test_a_duplicate_is_taken_once() -> None:
    first, second = sent(2)
    incoming = taker()
    assert incoming.take(first)
    assert incoming.take(first) is None
    assert incoming.take(second)
    assert incoming.take(first) is None
    assert incoming.refused == {"replayed": 2}


def test_after_a_loss_nothing_is_taken_until_it_comes() -> None:
    first, second, third = sent(3)
    incoming = taker()
    assert incoming.take(second) is None
    assert incoming.take(third) is None
    assert incoming.refused == {"out of order": 2}
    assert incoming.take(first)
    assert incoming.take(second)


def test_another_life_is_refused() -> None:
    incoming = taker()
    assert incoming.take(sent(1, generation=6)[0]) is None
    assert incoming.refused == {"another generation": 1}
    assert incoming.take(sent(1)[0])


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "not one or two frames"),
        ([b"", b"", b""], "not one or two frames"),
        ([b"short"], "malformed preamble"),
        ([PREAMBLE.pack(7, 0, 0, 5, 0) + b"four"], "malformed preamble"),
        ([PREAMBLE.pack(7, 0, 0, 2, 3) + b"four"], "malformed preamble"),
        ([PREAMBLE.pack(7, 0, 0, 4, 0) + b"four and more", b""], "malformed preamble"),
        ([PREAMBLE.pack(7, 0, 0, 2**32 - 1, 0), b""], "malformed preamble"),
        ([PREAMBLE.pack(7, 0, 0, 0, 2**32 - 1), b""], "malformed preamble"),
    ],
)
def test_misshapen_frames_are_refused(frames: list[bytes], reason: str) -> None:
    incoming = taker()
    assert incoming.take(frames) is None
    assert incoming.refused == {reason: 1}
    assert incoming.take(sent(1)[0])


def test_a_header_that_is_no_message_does_not_use_up_its_number() -> None:
    incoming = Incoming(7, wire.decode_at_controller)
    outgoing = Outgoing(7)
    [frame] = outgoing.frames(wire.encode(wire.Pong()))
    for _ in range(2):
        assert incoming.take([PREAMBLE.pack(7, 0, 0, 1, 0) + b"\xc1"]) is None
    assert incoming.take([frame]) == (wire.Pong(), NOTHING, 0)
    assert incoming.refused == {"malformed header": 2}


def test_a_header_is_decoded_once_and_few_are_kept() -> None:
    decoded: list[bytes] = []

    def decode(header: bytes) -> bytes:
        decoded.append(header)
        return header

    incoming = Incoming(7, decode)
    outgoing = Outgoing(7)
    for _ in range(3):
        assert incoming.take(outgoing.frames(b"again", VALUE)) == (b"again", VALUE, 0)
    assert decoded == [b"again"]
    for number in range(3 * MAX_KNOWN):
        header = b"%d" % number
        assert incoming.take(outgoing.frames(header, VALUE)) == (header, VALUE, 0)
    large = bytes(MAX_KNOWN_BYTES + 1)
    assert incoming.take(outgoing.frames(large)) == (large, NOTHING, 0)
    assert len(incoming._known) <= MAX_KNOWN
    assert large not in incoming._known


@pytest.mark.parametrize(
    ("module", "limit"), [(wire, "MAX_HEADER_BYTES"), (codec, "MAX_BODY_BYTES"), (codec, "MAX_PAYLOAD_BYTES")]
)
def test_oversize_is_refused(monkeypatch: pytest.MonkeyPatch, module: ModuleType, limit: str) -> None:
    monkeypatch.setattr(module, limit, 3)
    incoming = taker()
    assert incoming.take(sent(1)[0]) is None
    assert incoming.refused == {"oversize": 1}
