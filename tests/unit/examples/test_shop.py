"""The example of an agent over HTTP: what its program asks of a model, and how it grades."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from examples.shop.agent import CALLS, play

PRICES = {"lamp": 37, "old hat": 5}
TASK = {
    "question": "What does a lamp cost?",
    "meta": {"prices": PRICES, "things": ["lamp"], "total": 37},
}


@contextmanager
def model(*replies: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve replies, one for each call. Yields the address, and the bodies of the calls."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Authorization"] == "Bearer secret"
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = {"role": "assistant", "content": replies[len(bodies) - 1]}
            text = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", bodies
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("replies", "reward", "looked_up"),
    [
        (("LOOKUP: lamp", "PRICE: 37"), 1.0, 1.0),
        (("LOOKUP: a lamp", " PRICE: 37."), 1.0, 1.0),
        (("LOOKUP: old hat", "LOOKUP: lamp", "PRICE: 37"), 1.0, 1.0),
        (("LOOKUP: lamp", "PRICE: 38"), 0.0, 1.0),
        (("LOOKUP: lamp", "PRICE: 37 dollars, I think"), 0.0, 1.0),
        (("LOOKUP: boot", "PRICE: 37"), 1.0, 0.0),
        (("PRICE: 37",), 1.0, 0.0),
        (("Hello!",), 0.0, 0.0),
        (("LOOKUP: lamp",) * CALLS, 0.0, 1.0),
    ],
)
def test_the_reward_is_of_the_last_reply(
    replies: tuple[str, ...], reward: float, looked_up: float
) -> None:
    with model(*replies) as (address, bodies):
        assert play(address, "secret", TASK) == {"reward": reward, "looked_up": looked_up}
    assert len(bodies) == len(replies)


def test_the_model_reads_what_it_looked_up() -> None:
    with model("LOOKUP: lamp", "LOOKUP: boot", "PRICE: 37") as (address, bodies):
        play(address, "secret", TASK)
    roles = [message["role"] for message in bodies[-1]["messages"]]
    assert roles[-5:] == ["user", "assistant", "user", "assistant", "user"]
    assert bodies[1]["messages"][-1]["content"] == "lamp: 37"
    assert bodies[2]["messages"][-1]["content"] == "there is no boot"
    assert bodies[2]["messages"][: len(bodies[1]["messages"])] == bodies[1]["messages"]
