"""Messages: the closed set, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.controller.channel import messages
from spmd_rl.controller.channel.messages import (
    MALFORMED,
    decode_at_controller,
    decode_at_worker,
    encode,
)
from spmd_rl.errors import ContractError
from tests.fuzz.frames import TO_CONTROLLER, TO_WORKER


def same(a: messages.ChannelMessage, b: messages.ChannelMessage) -> bool:
    return type(a) is type(b) and msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


@pytest.mark.parametrize("message", TO_CONTROLLER)
def test_round_trip_to_the_controller(message: messages.ChannelMessage) -> None:
    assert same(decode_at_controller(encode(message)), message)


@pytest.mark.parametrize("message", TO_WORKER)
def test_round_trip_to_a_worker(message: messages.ChannelMessage) -> None:
    assert same(decode_at_worker(encode(message)), message)


@pytest.mark.parametrize("message", TO_WORKER)
def test_the_controller_takes_no_workers_orders(message: messages.ChannelMessage) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_at_controller(encode(message))


def test_the_table_of_the_page_is_the_set_of_messages() -> None:
    page = (Path(__file__).parents[4] / "docs/wire.md").read_text()
    page, _, _ = page.partition("## Between a rank and the process that generates")
    listed = set(re.findall(r"^\| `(\w+)` ", page, re.MULTILINE))
    assert listed == {type(message).__name__ for message in TO_CONTROLLER + TO_WORKER}


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_at_controller(msgspec.msgpack.encode({"type": "Pong", "extra": 1}))


def test_counts_are_few_and_have_short_names() -> None:
    for counts in ({"x" * 61: 1}, {str(number): 1 for number in range(33)}):
        with pytest.raises(msgspec.ValidationError):
            decode_at_controller(encode(messages.Pong(counts)))


def test_oversize_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_HEADER_BYTES", 64)
    with pytest.raises(ContractError, match="exceeds the wire's limit"):
        encode(messages.Dying("x" * 100))


@given(st.sampled_from(TO_CONTROLLER), st.data())
def test_mutated_headers_never_crash(message: messages.ChannelMessage, data: st.DataObject) -> None:
    header = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_at_controller(bytes(header))
    except MALFORMED:
        return
    assert isinstance(decoded, messages.ChannelMessage)


@given(st.binary(max_size=200))
def test_noise_never_crashes(header: bytes) -> None:
    with pytest.raises(MALFORMED):
        decode_at_worker(header)
