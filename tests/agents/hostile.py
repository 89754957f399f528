"""An agent that plays its game while it attacks the gateway at random, and that sometimes fails."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.agents.client import play_alone, posted

WAIT_S = 120.0  # the last resort
GARBAGE = (b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"messages": "\xc3"}', b"[" * 20_000)
ODD = (
    {"messages": 7},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": "a"}], "n": 5},
    {"messages": [{"role": "user", "content": "a"}], "temperature": 1e308},
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": -1},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"1": 100}},
)
NO_HTTP = (b"\x16\x03\x01" * 40, b"GET\r\n\r\n", b"\x00" * 99 + b"\n")
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")


class Gateway:
    """Raw connections to the gateway of an episode."""

    def __init__(self, base_url: str, key: str, rng: random.Random) -> None:
        self.port, self.key, self.rng = int(urlsplit(base_url).port or 0), key, rng

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def send(
        self, body: bytes, key: str | None = None, path: str | None = None, **named: str
    ) -> int:
        """Post a body, and return the status of the answer; 0: the connection was closed."""
        with self.connect() as one:
            one.sendall(self.head(len(body), key, path, **named) + body)
            return status_of(one)

    def head(
        self, size: int, key: str | None = None, path: str | None = None, **named: str
    ) -> bytes:
        lines = {"host": "x", "content-length": str(size), "connection": "close"}
        lines["authorization"] = f"Bearer {self.key if key is None else key}"
        lines |= {name.replace("_", "-"): value for name, value in named.items()}
        told = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {path or self.rng.choice(PATHS)} HTTP/1.1\r\n{told}\r\n".encode("latin-1")


def status_of(one: socket.socket) -> int:
    try:
        line = one.makefile("rb").readline()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


def asking(gateway: Gateway) -> bytes:
    """Return a request that the policy would answer."""
    said = f"number {gateway.rng.randrange(10**6)}"
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 2}
    return json.dumps(body).encode()


def garbage(gateway: Gateway) -> set[int]:
    body = gateway.rng.choice([*GARBAGE, gateway.rng.randbytes(200)])
    return {gateway.send(body)} - {400}


def odd_fields(gateway: Gateway) -> set[int]:
    body = json.dumps(gateway.rng.choice(ODD)).encode()
    return {gateway.send(body)} - {400}


def wrong_key(gateway: Gateway) -> set[int]:
    key = gateway.rng.choice(["", "sk-", gateway.key[:-1], gateway.key + "a", "x" * 5000, "é"])
    return {gateway.send(asking(gateway), key)} - {401}


def foreign_session(gateway: Gateway) -> set[int]:
    """Name the session of another, by every way that there is."""
    name = gateway.rng.choice(["0", "1", gateway.key, "player"])
    path = f"/s/{name if name != gateway.key else 'sk-0'}/v1/chat/completions"
    by_name = gateway.send(asking(gateway), "sk-shared", x_session_id=name)
    return {by_name, gateway.send(asking(gateway), path=path)} - {401}


def huge_body(gateway: Gateway) -> set[int]:
    """Announce a gigabyte, or send more than was announced."""
    with gateway.connect() as one:
        one.sendall(gateway.head(1 << 30) + b"x" * 1000)
        return {status_of(one)} - {413}


def huge_head(gateway: Gateway) -> set[int]:
    try:
        return {gateway.send(b"{}", x_padding="x" * (1 << 17))} - {0, 400}
    except ConnectionError:
        return set()


def half_closed(gateway: Gateway) -> set[int]:
    """Promise a body and close the sending half."""
    with gateway.connect() as one:
        one.sendall(gateway.head(1000) + b"{")
        one.shutdown(socket.SHUT_WR)
        return {status_of(one)} - {0, 400}


def hang_up(gateway: Gateway) -> set[int]:
    """Ask, and leave before the answer."""
    body = asking(gateway)
    with gateway.connect() as one:
        one.sendall(gateway.head(len(body), path=PATHS[0]) + body)
    return set()


def no_http(gateway: Gateway) -> set[int]:
    with gateway.connect() as one:
        one.sendall(
            gateway.rng.choice([b"\x16\x03\x01" * 40, b"GET\r\n\r\n", b"\x00" * 99 + b"\n"])
        )
        one.shutdown(socket.SHUT_WR)
        return {status_of(one)} - {0, 400}


def duplicates(gateway: Gateway) -> set[int]:
    """Send one request three times at once: one turn is drawn."""
    body, found = asking(gateway), list[int]()
    threads = [
        threading.Thread(
            target=lambda: found.append(
                gateway.send(body, path=PATHS[0], idempotency_key=str(len(body)))
            )
        )
        for _ in range(3)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return set(found) - {200}


class Slow:
    """Connections that say a little and then nothing, until the episode ends."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []

    def __call__(self, gateway: Gateway) -> set[int]:
        one = gateway.connect()
        one.sendall(gateway.head(1000)[: gateway.rng.randrange(1, 90)])
        self.held.append(one)
        return set()

    def close(self) -> None:
        for one in self.held:
            one.close()


FAULTS: tuple[Callable[[Gateway], set[int]], ...] = (
    garbage,
    odd_fields,
    wrong_key,
    foreign_session,
    huge_body,
    huge_head,
    half_closed,
    hang_up,
    no_http,
    duplicates,
)


def attack(base_url: str, key: str, task: dict[str, Any]) -> float:
    """Play, attack, and fail at random. What was done is noted in a file of the record."""
    meta = task["meta"]
    rng = random.Random(key)
    gateway, slow = Gateway(base_url, key, rng), Slow()
    ends = rng.choice(["well", "well", "well", "fails"])
    done: list[str] = []
    wrong: list[str] = []

    def some() -> None:
        for _ in range(meta["num_faults"]):
            fault = rng.choice([*FAULTS, slow])
            unexpected = fault(gateway)
            done.append(getattr(fault, "__name__", "slow"))
            wrong.extend(f"{done[-1]} got {status}" for status in unexpected)

    def ask(messages: list[Any]) -> str:
        some()
        return posted(base_url, key, messages)

    try:
        reward = play_alone(ask, int(meta["number"]))
    finally:
        slow.close()
        note = {"done": done, "wrong": wrong, "ends": ends}
        Path(meta["notes"], f"{rng.getrandbits(64):016x}.json").write_text(json.dumps(note))
    if ends == "fails" and "dies" in meta:
        os.kill(os.getpid(), signal.SIGKILL)
    if ends == "fails":
        raise RuntimeError("the agent has failed")
    return reward


def main() -> None:
    """Attack as a command, which may be killed: hostile.py BASE_URL KEY TASK_FILE."""
    base_url, key, task_file = sys.argv[1:]
    task = json.loads(Path(task_file).read_text())
    reward = attack(base_url, key, task | {"meta": task["meta"] | {"dies": True}})
    Path("result.json").write_text(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
