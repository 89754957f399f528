"""The controller's socket against a client that is not a worker: real sockets, one process."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_rl.controller.router import Router
from spmd_rl.controller.secret import Keys, derive
from spmd_rl.controller.wire import Hello, Pong, Stop, ToController, decode_at_worker, encode

WAIT_S = 10.0
GENERATION = 7


class Events:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.seen: queue.Queue[tuple[int, object]] = queue.Queue()

    def on_message(self, rank: int, message: ToController, payload: bytes) -> bool:
        self.seen.put((rank, message))
        return isinstance(message, Hello)

    def on_tick(self, now: float) -> None: ...

    def on_unreachable(self, rank: int) -> None:
        self.seen.put((rank, "unreachable"))

    def on_parent_lost(self) -> None:
        self.seen.put((0, "parent lost"))


@pytest.fixture
def lifelines() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def router(tmp_path: Path, events: Events, lifelines: tuple[socket.socket, socket.socket]) -> Iterator[Router]:
    router = Router(f"ipc://{tmp_path}/s", derive(b"a" * 32), GENERATION, events, lifelines[0])
    yield router
    router.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def dial(context: zmq.Context[zmq.Socket[bytes]], router: Router, keys: Keys, rank: int = 0) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.identity = b"rank-%d" % rank
    dealer.rcvtimeo = int(WAIT_S * 1000)
    dealer.curve_serverkey = keys.server.public
    dealer.curve_publickey, dealer.curve_secretkey = keys.client.public, keys.client.private
    dealer.linger = 0
    dealer.connect(router.endpoint)
    return dealer


def test_noise_is_dropped_and_counted(router: Router, events: Events, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with dial(context, router, derive(b"a" * 32)) as dealer:
        for frames in ([b""], [b"noise", b""], [b"a", b"b", b"c"], encode(GENERATION + 1, Pong())):
            dealer.send_multipart(frames)
        dealer.send_multipart(encode(GENERATION, Hello(0, "host", 1)))
        assert events.seen.get(timeout=WAIT_S) == (0, Hello(0, "host", 1))
        assert sum(router.dropped.values()) == 4
        router.post([0], Stop("why", 2))
        assert decode_at_worker(GENERATION, dealer.recv_multipart())[0] == Stop("why", 2)


def test_a_known_server_key_does_not_admit_an_unknown_client(
    router: Router, events: Events, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    mixed = Keys(derive(b"a" * 32).server, derive(b"b" * 32).client)
    failed = zmq.EVENT_HANDSHAKE_FAILED_AUTH
    with dial(context, router, mixed) as stranger, stranger.get_monitor_socket(failed) as monitor:
        assert monitor.poll(WAIT_S * 1000)
        assert recv_monitor_message(monitor)["value"] == 400
        stranger.disable_monitor()
    assert events.seen.empty()


def test_a_closed_connection_is_unreachable(
    router: Router, events: Events, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router.post([3], Stop("", 0))
    assert events.seen.get(timeout=WAIT_S) == (3, "unreachable")


def test_the_end_of_the_lifeline_is_noticed_once(
    router: Router, events: Events, lifelines: tuple[socket.socket, socket.socket]
) -> None:
    lifelines[1].close()
    assert events.seen.get(timeout=WAIT_S) == (0, "parent lost")
