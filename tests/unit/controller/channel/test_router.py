"""Router and clients that are no workers, over real sockets in one process."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from signal import Signals

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_rl.controller.channel.codec import NOTHING, Packed
from spmd_rl.controller.channel.dealer import Dealer
from spmd_rl.controller.channel.envelope import (
    PREAMBLE,
    PREAMBLE_BYTES,
    EnvelopeReader,
    EnvelopeWriter,
)
from spmd_rl.controller.channel.messages import (
    Bye,
    Call,
    Hello,
    Pong,
    Stop,
    ToController,
    ToWorker,
    decode_at_worker,
    encode,
)
from spmd_rl.controller.channel.router import SHORT_WAIT_S, Router
from spmd_rl.controller.channel.secret import Keys, derive_keys

WAIT_S = 100.0
GENERATION = 7
WORLD = 4


class RecordingListener:
    """A listener of a router that records its events."""

    def __init__(self) -> None:
        self.seen: queue.Queue[tuple[int, object]] = queue.Queue()

    def on_result(self, call: int, rank: int, value: Packed) -> bool:
        self.seen.put((rank, value))
        return True

    def on_message(self, rank: int, message: ToController, value: Packed, call: int) -> bool:
        self.seen.put((rank, message))
        return True

    def on_tick(self, now: float) -> None: ...

    def on_unreachable(self, rank: int) -> None:
        self.seen.put((rank, "unreachable"))

    def on_parent_lost(self) -> None:
        self.seen.put((0, "parent lost"))

    def on_signal(self, number: Signals) -> None: ...


class SilentListener:
    """A listener of a dealer that ignores its events."""

    def on_message(self, message: ToWorker) -> None: ...

    def on_tick(self, now: float) -> None: ...

    def on_signal(self, number: Signals) -> None: ...

    def on_disconnected(self) -> None: ...

    def on_handshake_failed(self) -> None: ...


@pytest.fixture
def lifelines() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def events() -> RecordingListener:
    return RecordingListener()


@pytest.fixture
def router(
    tmp_path: Path, events: RecordingListener, lifelines: tuple[socket.socket, socket.socket]
) -> Iterator[Router]:
    router = Router(
        f"ipc://{tmp_path}/s", derive_keys(b"a" * 32), GENERATION, WORLD, events, lifelines[0]
    )
    router.start()
    yield router
    router.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def dial(
    context: zmq.Context[zmq.Socket[bytes]], router: Router, keys: Keys, rank: int = 0
) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"rank-%d" % rank
    dealer.rcvtimeo = int(WAIT_S * 1000)
    dealer.curve_serverkey = keys.server.public
    dealer.curve_publickey, dealer.curve_secretkey = keys.client.public, keys.client.private
    dealer.linger = 0
    dealer.connect(router.endpoint)
    return dealer


def test_noise_is_dropped_and_counted(
    router: Router, events: RecordingListener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with dial(context, router, derive_keys(b"a" * 32)) as dealer:
        writer = EnvelopeWriter(GENERATION)
        hello = writer.frame(encode(Hello(0, "host", 1)))
        stale = EnvelopeWriter(GENERATION + 1).frame(encode(Pong()))
        noise = PREAMBLE.pack(GENERATION, 0, 0, PREAMBLE_BYTES + 5, PREAMBLE_BYTES + 5) + b"noise"
        for frames in ([b"", b"", b""], [b"noise"], [b"a", b"b", b"c", b"d"], [stale], [noise]):
            dealer.send_multipart(frames)
        dealer.send(hello)
        assert events.seen.get(timeout=WAIT_S) == (0, Hello(0, "host", 1))
        pong, later = writer.frame(encode(Pong())), writer.frame(encode(Pong()))
        for frame in (hello, later, pong):
            dealer.send(frame)
        assert events.seen.get(timeout=WAIT_S) == (0, Pong())
        router.post([0], Stop("why", 2, []))
        taken = EnvelopeReader(GENERATION, decode_at_worker).read(dealer.recv())
        assert taken == (Stop("why", 2, []), NOTHING, 0)
    assert events.seen.empty()
    assert router.refused == {
        "unknown identity": 5,
        "malformed preamble": 3,
        "another generation": 1,
        "malformed header": 1,
        "replayed": 1,
        "out of order": 1,
    }


def test_they_meet_over_ipv6(
    events: RecordingListener,
    lifelines: tuple[socket.socket, socket.socket],
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this host has no IPv6: {error}")
    keys = derive_keys(b"a" * 32)
    router = Router("tcp://[::1]:*", keys, GENERATION, WORLD, events, lifelines[0])
    router.start()
    with closing(Dealer(router.endpoint, keys, GENERATION, 0, SilentListener())) as dealer:
        dealer.start()
        dealer.post(Hello(0, "host", 1))
        assert events.seen.get(timeout=WAIT_S) == (0, Hello(0, "host", 1))
    router.close()


def test_a_dealer_that_does_not_wait_returns_all_commands_that_are_here(
    router: Router, events: RecordingListener
) -> None:
    keys = derive_keys(b"a" * 32)
    with closing(Dealer(router.endpoint, keys, GENERATION, 0, SilentListener())) as dealer:
        dealer.start()
        dealer.post(Hello(0, "host", 1))
        assert events.seen.get(timeout=WAIT_S) == (0, Hello(0, "host", 1))
        assert dealer.next(wait=False) == []
        for number in range(1, 6):
            router.post_each(encode(Call("role", "go")), [((0,), NOTHING)], number)
        received = dealer.next()
        assert [number for _, _, number in received] == [1]
        while len(received) < 5:
            received += dealer.next(wait=False)
        assert [number for _, _, number in received] == [1, 2, 3, 4, 5]
        assert dealer.next(wait=False) == []


def test_a_rank_that_is_not_of_this_world_is_a_stranger(
    router: Router, events: RecordingListener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with (
        dial(context, router, derive_keys(b"a" * 32), WORLD) as beyond,
        dial(context, router, derive_keys(b"a" * 32)) as known,
    ):
        beyond.send(EnvelopeWriter(GENERATION).frame(encode(Hello(0, "host", 1))))
        while not router.refused:
            known.send(b"")
        assert router.refused.keys() <= {"unknown identity", "malformed preamble"}
    assert events.seen.empty()


def test_no_rank_speaks_for_another_in_a_frame_too_many(
    router: Router, events: RecordingListener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with (
        dial(context, router, derive_keys(b"a" * 32)) as sly,
        dial(context, router, derive_keys(b"a" * 32), 1) as honest,
    ):
        writer = EnvelopeWriter(GENERATION, 2**61)
        honest.send(writer.frame(encode(Hello(1, "host", 1))))
        assert events.seen.get(timeout=WAIT_S) == (1, Hello(1, "host", 1))
        guess = EnvelopeWriter(GENERATION)
        guess.frame(encode(Hello(1, "host", 1)))
        sly.send_multipart([b"", b"rank-1", guess.frame(encode(Pong()))])
        while router.refused.total() < 2:
            pass
        honest.send(writer.frame(encode(Bye())))
        assert events.seen.get(timeout=WAIT_S) == (1, Bye())
    assert router.refused == {"malformed preamble": 1, "replayed": 1}


def test_a_known_server_key_does_not_admit_an_unknown_client(
    router: Router, events: RecordingListener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    mixed = Keys(derive_keys(b"a" * 32).server, derive_keys(b"b" * 32).client)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with dial(context, router, mixed) as stranger, stranger.get_monitor_socket(failed) as monitor:
        assert monitor.poll(WAIT_S * 1000)
        assert recv_monitor_message(monitor)["value"] == 400
        stranger.disable_monitor()
    assert events.seen.empty()


def test_a_closed_connection_is_unreachable(
    router: Router, events: RecordingListener, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router.post([3], Stop("", 0, []))
    assert events.seen.get(timeout=WAIT_S) == (3, "unreachable")


def test_a_wait_of_a_moment_ends_though_frames_go_on_coming(
    router: Router, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    ended = threading.Event()
    with dial(context, router, derive_keys(b"a" * 32)) as dealer:

        def flood() -> None:
            while not ended.wait(0.0005):
                dealer.send(b"")

        flooding = threading.Thread(target=flood)
        flooding.start()
        while not router.refused:
            ended.wait(0.01)
        began = time.monotonic()
        assert not router.handle_until(lambda: False, SHORT_WAIT_S)
        took_s = time.monotonic() - began
        ended.set()
        flooding.join()
    assert took_s < WAIT_S / 2


def test_the_end_of_the_lifeline_is_noticed_once(
    router: Router, events: RecordingListener, lifelines: tuple[socket.socket, socket.socket]
) -> None:
    lifelines[1].close()
    assert events.seen.get(timeout=WAIT_S) == (0, "parent lost")
