"""A hundred thousand wrong frames to both ends' dispatch: none is accepted, and none crashes it."""

from __future__ import annotations

import resource
import socket
from contextlib import closing
from pathlib import Path
from signal import Signals

import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.codec import Codec, Packed, pack
from spmd_rl.controller.channel.dealer import Dealer
from spmd_rl.controller.channel.envelope import EnvelopeWriter
from spmd_rl.controller.channel.messages import (
    Call,
    Hello,
    Refusal,
    ToController,
    ToWorker,
    decode_at_controller,
    decode_at_worker,
    encode,
)
from spmd_rl.controller.channel.router import Router
from spmd_rl.controller.channel.secret import derive_keys
from spmd_rl.errors import ContractError
from tests.fuzz.frames import TO_CONTROLLER, TO_WORKER, VALUE, Fuzzer

FRAMES = 50_000
WARM = 5_000
GENERATION = 7
GROWTH_KIB = 8 << 10

KEYS = derive_keys(b"a" * 32)


class RouterListener:
    """A listener of a router; it gets one Hello and should get nothing else."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def on_result(self, call: int, rank: int, value: Packed) -> bool:
        self.events.append(value)
        return True

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        self.events.append(message)
        return True

    def on_tick(self, now: float) -> None: ...

    def on_unreachable(self, rank: int) -> None:
        self.events.append("unreachable")

    def on_parent_lost(self) -> None:
        self.events.append("parent lost")

    def on_signal(self, number: Signals) -> None:
        self.events.append(number)


class DealerListener:
    """A listener of a dealer; it should get nothing."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def on_message(self, message: ToWorker) -> None:
        self.events.append(message)

    def on_tick(self, now: float) -> None: ...

    def on_signal(self, number: Signals) -> None:
        self.events.append(number)

    def on_disconnected(self) -> None:
        self.events.append("disconnected")

    def on_handshake_failed(self) -> None:
        self.events.append("handshake failed")


def test_the_controller_takes_none(tmp_path: Path) -> None:
    listener, (ours, theirs) = RouterListener(), socket.socketpair()
    with (
        ours,
        theirs,
        closing(Router(f"ipc://{tmp_path}/s", KEYS, GENERATION, 2, listener, ours)) as router,
    ):
        router.start()
        hello = EnvelopeWriter(GENERATION).frame(encode(Hello(1, "host", 1)))
        router.handle_message(iter([b"rank-1", hello]).__next__)
        fuzzer = Fuzzer(1, GENERATION, TO_CONTROLLER, decode_at_controller)
        for count in range(WARM + FRAMES):
            if count == WARM:
                before = peak_kib()
            router.handle_message(iter([b"rank-1", fuzzer.frame(1)]).__next__)
        assert peak_kib() - before < GROWTH_KIB
        assert sum(router.refused.values()) == WARM + FRAMES
        assert router.refused.keys() <= set(Refusal)
        assert listener.events == [Hello(1, "host", 1)]


def test_the_worker_takes_none(tmp_path: Path) -> None:
    listener = DealerListener()
    with closing(Dealer(f"ipc://{tmp_path}/nobody", KEYS, GENERATION, 0, listener)) as dealer:
        dealer.start()
        writer = EnvelopeWriter(GENERATION)
        assert dealer.handle_frame(writer.frame(encode(Call("actor", "go")), VALUE, 1))
        fuzzer = Fuzzer(2, GENERATION, TO_WORKER, decode_at_worker)
        for count in range(WARM + FRAMES):
            if count == WARM:
                before = peak_kib()
            assert dealer.handle_frame(fuzzer.frame(1)) is None
        assert peak_kib() - before < GROWTH_KIB
        assert sum(dealer.refused.values()) == WARM + FRAMES
        assert dealer.handle_frame(writer.frame(encode(Call("actor", "go")), VALUE, 2)), (
            "a right frame is still taken"
        )
        assert listener.events == []


def test_mutated_values_are_refused_or_are_arrays() -> None:
    """The value of a call is decoded by its endpoint's annotation alone."""
    good = pack({"a": np.arange(12.0).reshape(3, 4), "b": np.zeros(0, np.int32)})
    rng = np.random.default_rng(3)
    codec, refused = Codec(dict[str, NDArray[np.generic]]), 0
    for _ in range(10_000):
        body = bytearray(good[0])
        for _ in range(rng.integers(1, 4)):
            body[rng.integers(len(body))] = rng.integers(256)
        payload = good[1][: rng.choice([len(good[1]), rng.integers(len(good[1]))])]
        try:
            value = codec.unpack((bytes(body), payload))
        except ContractError:
            refused += 1
            continue
        assert all(isinstance(array, np.ndarray) for array in value.values())
    assert 0 < refused < 10_000


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
