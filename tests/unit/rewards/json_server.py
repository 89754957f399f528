"""An HTTP server of this process on a port of its own, for graders that ask one."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One request: its path, its body and its headers."""

    path: str
    body: Any
    headers: dict[str, str]


class Reset:
    """An answer that breaks the connection."""

    def __str__(self) -> str:
        return "reset"


class Silence:
    """An answer that never comes."""


Answer = tuple[int, Any] | Reset | Silence | Any  # a status and what is sent, or this alone


class JsonServer(AbstractContextManager["JsonServer"]):
    """Answers the n-th request with `answer(n, asked)`. `asked` are all requests so far."""

    def __init__(self, answer: Callable[[int, Asked], Answer]) -> None:
        self.asked: list[Asked] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                asked = Asked(self.path, json.loads(self.rfile.read(length)), dict(self.headers))
                with outer._lock:
                    number = len(outer.asked)
                    outer.asked.append(asked)
                outer._send(self, answer(number, asked))

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        if isinstance(answer, Reset):
            now = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(answer, Silence):
            self._ended.wait()
            handler.close_connection = True
            return
        status, value = answer if isinstance(answer, tuple) else (200, answer)
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)
