"""Millions of wrong frames, over real sockets, to a live controller and a live worker at work.

    python -m tests.fuzz --frames 600000 --seed 1

The frames come from processes that hold the run's secret: nobody else can send a frame. Each side
must refuse and count all of them, answer the right frames in between, stay alive, and not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from spmd_rl.controller.channel import secret
from spmd_rl.controller.channel.codec import NOTHING, Packed, pack
from spmd_rl.controller.channel.dealer import _client_socket
from spmd_rl.controller.channel.envelope import EnvelopeReader, EnvelopeWriter
from spmd_rl.controller.channel.messages import (
    Bye,
    Call,
    ChannelMessage,
    CommandResult,
    Hello,
    Ping,
    Pong,
    StackRequest,
    Stacks,
    Stop,
    decode_at_controller,
    decode_at_worker,
    encode,
)
from spmd_rl.controller.channel.router import _server_socket
from tests.fuzz.frames import TO_CONTROLLER, TO_WORKER, Fuzzer
from tests.fuzz.live import NAME

WARM_PART = 0.1  # part of the frames, after which memory is first measured
GROWTH_BYTES = 16 << 20
EVERY = 2_000  # wrong frames between two readings of the answers
WAIT_MS = 30_000


class Child:
    """A process under attack."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.live", *words]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._first = 0

    def line(self) -> dict[str, object]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def rss(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGESIZE"
        )

    def remember(self) -> None:
        self._first = self.rss()

    def grown(self) -> int:
        return self.rss() - self._first

    def ended(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_MS / 1000)


def attack(
    num_frames: int, children: list[Child], send: Callable[[], int], look: Callable[[], None]
) -> int:
    """Send wrong frames, reading the answers now and then; return the number of frames."""
    sent, next_look, warm = 0, 0, False
    while sent < num_frames:
        if not warm and sent >= num_frames * WARM_PART:
            warm = True
            look()
            for child in children:
                child.remember()
        if sent >= next_look:
            next_look += EVERY
            look()
        sent += send()
    look()
    return sent


def attack_controller(num_frames: int, seed: int, folder: Path, keys: secret.Keys) -> str:
    generation = secrets.randbits(63)
    controller = Child("controller", f"ipc://{folder}/controller", str(generation))
    endpoint = str(controller.line()["endpoint"])
    worker = Child("worker", endpoint, str(generation), "0")
    with zmq.Context() as context, _client_socket(context, keys, 1) as line:
        line.linger, line.rcvtimeo, line.sndhwm = 0, WAIT_MS, 1000
        line.connect(endpoint)
        reader, writer = EnvelopeReader(generation, decode_at_worker), EnvelopeWriter(generation)
        fuzzer, sent = Fuzzer(seed, generation, TO_CONTROLLER, decode_at_controller), 0

        def say(message: ChannelMessage) -> None:
            nonlocal sent
            sent += 1
            line.send(writer.frame(encode(message)))

        def look() -> None:
            while line.poll(0):
                answer(line.recv())

        def wrong() -> int:
            line.send_multipart(frames := fuzzer.frames(sent))
            return len(frames)

        def answer(frame: bytes) -> None:
            opened = reader.read(frame)
            if opened and isinstance(opened[0], Ping):
                say(Pong())
            elif opened and isinstance(opened[0], Stop):
                say(Bye())

        say(Hello(1, "attacker", os.getpid()))
        answer(line.recv())
        assert controller.line()["working"]
        num_frames = attack(num_frames, [controller, worker], wrong, look)
        time.sleep(1.0)  # for the last frames to be read before their count is requested
        growth = max(controller.grown(), worker.grown())
        assert controller.process.stdin is not None
        controller.process.stdin.close()
        while controller.process.poll() is None:
            if line.poll(100):
                answer(line.recv())
        report = controller.line()
        assert controller.process.returncode == 0
        assert worker.ended() == 0
    counts: dict[str, int] = report["refused"]  # type: ignore[assignment]
    assert sum(counts.values()) == num_frames, (counts, num_frames)
    assert int(str(report["calls"])) > 10, "the controller has to go on with its work meanwhile"
    assert growth < GROWTH_BYTES, f"{growth} bytes more"
    return (
        f"controller: {num_frames} refused {counts}, {report['calls']} calls meanwhile, "
        f"grew {growth >> 10} KiB"
    )


def attack_worker(num_frames: int, seed: int, folder: Path, keys: secret.Keys) -> str:
    generation = secrets.randbits(63)
    with zmq.Context() as context, _server_socket(context, keys) as line:
        line.linger, line.rcvtimeo, line.sndhwm = 0, WAIT_MS, 1000
        line.bind(f"ipc://{folder}/worker")
        worker = Child("worker", f"ipc://{folder}/worker", str(generation), "0")
        reader, writer = (
            EnvelopeReader(generation, decode_at_controller, first=None),
            EnvelopeWriter(generation),
        )
        fuzzer, sent, calls = Fuzzer(seed, generation, TO_WORKER, decode_at_worker), 0, 0

        def say(message: ChannelMessage, value: Packed = NOTHING, call: int = 0) -> None:
            nonlocal sent
            sent += 1
            line.send_multipart([b"rank-0", writer.frame(encode(message), value, call)])

        def hear(kind: type[ChannelMessage]) -> tuple[ChannelMessage, Packed, int]:
            while True:
                opened = reader.read(line.recv_multipart()[1])
                assert opened
                if isinstance(opened[0], kind):
                    return opened

        def look() -> None:
            nonlocal calls
            calls += 1
            say(Ping(60.0, ""))
            say(Call(NAME, "echo"), pack((calls,)), calls)
            _, answer, call = hear(CommandResult)
            assert (call, answer) == (calls, pack(calls))

        def wrong() -> int:
            line.send_multipart([b"rank-0", *(frames := fuzzer.frames(sent))])
            return len(frames)

        hear(Hello)
        num_frames = attack(num_frames, [worker], wrong, look)
        say(StackRequest())
        stacks, _, _ = hear(Stacks)
        assert isinstance(stacks, Stacks)
        growth = worker.grown()
        say(Stop("", 0, []))
        hear(Bye)
        assert worker.ended() == 0
    assert sum(stacks.refused.values()) == num_frames, (stacks.refused, num_frames)
    assert growth < GROWTH_BYTES, f"{growth} bytes more"
    return (
        f"worker: {num_frames} refused {stacks.refused}, {calls} calls meanwhile, "
        f"grew {growth >> 10} KiB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=600_000, help="to each of the two")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    os.environ[secret.SECRET_ENV] = secrets.token_hex(secret.SECRET_BYTES)
    key = secret.from_environment()
    assert key is not None
    with tempfile.TemporaryDirectory() as folder:
        for attack_one in (attack_controller, attack_worker):
            began = time.monotonic()
            print(attack_one(args.frames, args.seed, Path(folder), secret.derive_keys(key)), end="")
            print(f", {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
