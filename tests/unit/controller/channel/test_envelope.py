"""Envelope: frames in order, and frames that are refused."""

from __future__ import annotations

from types import ModuleType

import pytest

from spmd_rl.controller.channel import codec, messages
from spmd_rl.controller.channel.codec import NOTHING
from spmd_rl.controller.channel.decode_cache import MAX_ENTRIES, MAX_KEY_BYTES
from spmd_rl.controller.channel.envelope import (
    LARGE_BYTES,
    PREAMBLE,
    PREAMBLE_BYTES,
    EnvelopeReader,
    EnvelopeWriter,
)

VALUE = b"body", b"payload"


def taker(generation: int = 7) -> EnvelopeReader[bytes]:
    return EnvelopeReader(generation, lambda header: header)


def sent(count: int, generation: int = 7, first: int = 0) -> list[bytes]:
    writer = EnvelopeWriter(generation, first)
    return [writer.frame(b"header %d" % number, VALUE, number + 5) for number in range(count)]


def preamble(header_bytes: int, body_bytes: int) -> bytes:
    body_at = PREAMBLE_BYTES + header_bytes
    return PREAMBLE.pack(7, 0, 0, body_at, body_at + body_bytes)


def test_messages_pass_in_order() -> None:
    reader = taker()
    expected = [(b"header %d" % number, VALUE, number + 5) for number in range(3)]
    assert [reader.read(frame) for frame in sent(3)] == expected
    assert not reader.refused


def test_numbers_that_begin_anywhere_are_taken_from_there_on() -> None:
    first, second, third = sent(3, first=2**62)
    reader: EnvelopeReader[bytes] = EnvelopeReader(7, lambda header: header, first=None)
    assert reader.read(sent(1, generation=6)[0]) is None
    assert reader.read(first)
    assert reader.read(third) is None
    assert reader.read(sent(1)[0]) is None
    assert reader.read(second)
    assert reader.read(first) is None
    assert reader.refused == {"another generation": 1, "out of order": 1, "replayed": 2}


def test_a_large_payload_is_not_copied_out_of_its_frame() -> None:
    writer, reader = EnvelopeWriter(7), taker()
    frame = writer.frame(b"header", (b"body", bytes(LARGE_BYTES)))
    taken = reader.read(frame)
    assert taken
    assert taken == (b"header", (b"body", bytes(LARGE_BYTES)), 0)
    assert taken[1][1].obj is frame  # type: ignore[attr-defined]


def test_a_duplicate_is_taken_once() -> None:
    first, second = sent(2)
    reader = taker()
    assert reader.read(first)
    assert reader.read(first) is None
    assert reader.read(second)
    assert reader.read(first) is None
    assert reader.refused == {"replayed": 2}


def test_after_a_loss_nothing_is_taken_until_it_comes() -> None:
    first, second, third = sent(3)
    reader = taker()
    assert reader.read(second) is None
    assert reader.read(third) is None
    assert reader.refused == {"out of order": 2}
    assert reader.read(first)
    assert reader.read(second)


def test_another_life_is_refused() -> None:
    reader = taker()
    assert reader.read(sent(1, generation=6)[0]) is None
    assert reader.refused == {"another generation": 1}
    assert reader.read(sent(1)[0])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"short",
        preamble(5, 0) + b"four",
        preamble(2, 3) + b"four",
        preamble(-1, 0),
        preamble(4, -1) + b"four",
        PREAMBLE.pack(7, 0, 0, 2**32 - 1, 2**32 - 1),
        PREAMBLE.pack(7, 0, 0, PREAMBLE_BYTES, 2**32 - 1),
        PREAMBLE.pack(7, 0, 0, 2**32 - 1, PREAMBLE_BYTES),
    ],
)
def test_misshapen_frames_are_refused(frame: bytes) -> None:
    reader = taker()
    assert reader.read(frame) is None
    assert reader.refused == {"malformed preamble": 1}
    assert reader.read(sent(1)[0])


def test_a_head_that_is_known_is_not_taken_from_a_frame_that_ends_early() -> None:
    writer, reader = EnvelopeWriter(7), taker()
    assert reader.read(writer.frame(b"header", VALUE))
    cut = writer.frame(b"header", VALUE)[: -len(VALUE[1]) - 1]
    assert reader.read(cut) is None
    assert reader.refused == {"malformed preamble": 1}


def test_a_header_that_is_no_message_does_not_use_up_its_number() -> None:
    reader = EnvelopeReader(7, messages.decode_at_controller)
    writer = EnvelopeWriter(7)
    frame = writer.frame(messages.encode(messages.Pong()))
    for _ in range(2):
        assert reader.read(preamble(1, 0) + b"\xc1") is None
    assert reader.read(frame) == (messages.Pong(), NOTHING, 0)
    assert reader.refused == {"malformed header": 2}


def test_a_header_is_decoded_once_and_few_are_kept() -> None:
    decoded: list[bytes] = []

    def decode(header: bytes) -> bytes:
        decoded.append(header)
        return header

    reader = EnvelopeReader(7, decode)
    writer = EnvelopeWriter(7)
    for _ in range(3):
        assert reader.read(writer.frame(b"again", VALUE)) == (b"again", VALUE, 0)
    assert decoded == [b"again"]
    for number in range(3 * MAX_ENTRIES):
        header = b"%d" % number
        assert reader.read(writer.frame(header, VALUE)) == (header, VALUE, 0)
    large = bytes(MAX_KEY_BYTES + 1)
    assert reader.read(writer.frame(large)) == (large, NOTHING, 0)
    assert len(reader._cache) <= MAX_ENTRIES
    assert large not in reader._cache


@pytest.mark.parametrize(
    ("module", "limit"),
    [(messages, "MAX_HEADER_BYTES"), (codec, "MAX_BODY_BYTES"), (codec, "MAX_PAYLOAD_BYTES")],
)
def test_oversize_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, limit: str
) -> None:
    monkeypatch.setattr(module, limit, 3)
    reader = taker()
    assert reader.read(sent(1)[0]) is None
    assert reader.refused == {"oversize": 1}
