"""Plain ZeroMQ: a ROUTER, a DEALER a worker, raw bytes; encrypted with --curve; through relays with
--relays.

python -m benchmarks.control.zeromq WORKERS [--curve] [--relays N] [--per-process N]

A relay takes one message for all of its workers and returns one with all of their answers, so that
the caller's work grows with the number of relays: what a relay on each node would do for the
controller.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile

import zmq

from benchmarks.control.echo import Array, serve

SERVER, CLIENT = zmq.curve_keypair(), zmq.curve_keypair()


def work(endpoint: str, names: list[bytes], curve: bool) -> None:
    poller = zmq.Poller()
    for name in names:
        poller.register(dealer := _dealer(endpoint, name, curve), zmq.POLLIN)
    if len(names) == 1:
        while True:
            dealer.send(dealer.recv())
    while True:
        for dealer, _ in poller.poll():
            dealer.send(dealer.recv())


def relay(upstream: str, name: bytes, downstream: str, workers: list[bytes]) -> None:
    router = _router(downstream, curve=False)
    _greeted(router, workers)
    dealer = _dealer(upstream, name, curve=False)
    while True:
        dealer.send_multipart(_exchange(router, workers, dealer.recv_multipart()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workers", type=int)
    parser.add_argument("--curve", action="store_true")
    parser.add_argument("--relays", type=int, default=0)
    parser.add_argument(
        "--per-process", type=int, default=1, help="how many workers' sockets share a process"
    )
    arguments = parser.parse_args()
    num_workers, num_relays, curve = arguments.workers, arguments.relays, arguments.curve
    fork = multiprocessing.get_context("fork")
    names = [b"%d" % worker for worker in range(num_workers)]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        groups = [names[first::num_relays] for first in range(num_relays)] or [names]
        ends = [f"ipc://{folder}/{number}" for number in range(len(groups))]
        for end, group in zip(ends, groups, strict=True):
            for first in range(0, len(group), arguments.per_process):
                together = group[first : first + arguments.per_process]
                fork.Process(target=work, args=(end, together, curve), daemon=True).start()
        top = f"ipc://{folder}/top" if num_relays else ends[0]
        for end, group in zip(ends, groups, strict=True) if num_relays else ():
            fork.Process(target=relay, args=(top, group[0], end, group), daemon=True).start()
        router = _router(top, curve)
        _greeted(router, [group[0] for group in groups] if num_relays else names)

        def direct(parts: list[Array]) -> list[bytes]:
            return _exchange(router, names, parts)

        def relayed(parts: list[Array]) -> list[bytes]:
            for first, group in enumerate(groups):
                router.send_multipart([group[0], *parts[first::num_relays]])
            answers = {name: rest for name, *rest in (router.recv_multipart() for _ in groups)}
            return [answers[groups[i % num_relays][0]][i // num_relays] for i in range(num_workers)]

        serve(num_workers, relayed if num_relays else direct)


def _exchange(
    router: zmq.Socket[bytes], names: list[bytes], parts: list[Array] | list[bytes]
) -> list[bytes]:
    for name, part in zip(names, parts, strict=True):
        router.send_multipart([name, part])
    answers = dict(router.recv_multipart() for _ in names)
    return [answers[name] for name in names]


def _router(endpoint: str, curve: bool) -> zmq.Socket[bytes]:
    router = zmq.Context().socket(zmq.ROUTER)
    if curve:
        router.curve_server = True
        router.curve_secretkey = SERVER[1]
    router.bind(endpoint)
    return router


def _dealer(endpoint: str, name: bytes, curve: bool) -> zmq.Socket[bytes]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.identity = name
    if curve:
        dealer.curve_serverkey = SERVER[0]
        dealer.curve_publickey, dealer.curve_secretkey = CLIENT
    dealer.connect(endpoint)
    dealer.send(b"")
    return dealer


def _greeted(router: zmq.Socket[bytes], names: list[bytes]) -> None:
    waiting = set(names)
    while waiting:
        waiting.discard(router.recv_multipart()[0])


if __name__ == "__main__":
    main()
