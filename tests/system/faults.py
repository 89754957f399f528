"""Faults between this package and ZeroMQ, or below it, installed in a process by its environment.

The variable is JSON: the `kind` of fault, the `side` that it strikes ("controller" or a rank), and
after how many frames or bytes. The package does not know of this file, which replaces the function
that sends a message, or puts a proxy that corrupts bytes between a rank and its controller.
"""

from __future__ import annotations

import json
import os
import random
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "SPMD_RL_TEST_FAULT"


@dataclass(frozen=True)
class Fault:
    kind: str  # drop, delay, duplicate, corrupt, or bytes
    side: str  # the struck process: "controller", "0", "1" ...
    after: int  # number of frames sent before it strikes
    seconds: float = 0.0  # length of a delay
    seed: int = 0

    def text(self) -> str:
        return json.dumps(self.__dict__)


def given() -> Fault | None:
    text = os.environ.get(ENVIRONMENT)
    return Fault(**json.loads(text)) if text else None


def install_in_controller() -> None:
    """Install the fault if this process is the controller that it is meant for.

    Call it where the recipe is imported.
    """
    fault = given()
    if fault is not None and fault.side == "controller":
        _strike_frames(fault)


def install_in_rank() -> None:
    """Install the fault if it is meant for this rank. Call it before the rank connects."""
    fault = given()
    if fault is None or fault.side != os.environ.get("RANK"):
        return
    if fault.kind == "bytes":
        _strike_bytes(fault)
    else:
        _strike_frames(fault)


def _strike_frames(fault: Fault) -> None:
    """Replace the function with which this side sends.

    Ranks import the recipe too, so that only the fault's side is changed.
    """
    from spmd_rl.controller.channel import dealer, frames, router

    sent = 0

    def struck(message: bytes) -> list[bytes]:
        nonlocal sent
        sent += 1
        if sent != fault.after:
            return [message]
        struck_file().touch()
        return _altered(fault, message)

    identity: bytes | None = None

    def send(socket: Any, frame: bytes, flags: int) -> None:
        nonlocal identity
        if flags == frames.LATER:
            identity = frame
            return
        for altered in struck(frame):
            if identity is not None:
                frames.send(socket, identity, frames.LATER)
            frames.send(socket, altered, frames.LAST)

    side = router if fault.side == "controller" else dealer
    side.send = send  # type: ignore[attr-defined]


def struck_file() -> Path:
    """Return the file whose time of modification says when the fault struck."""
    return Path(tempfile.gettempdir()) / "struck"


def _altered(fault: Fault, message: bytes) -> list[bytes]:
    """Return what is sent in place of a message."""
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    if fault.kind == "corrupt":
        return [corrupted(message, random.Random(fault.seed))]
    return [message] * {"drop": 0, "duplicate": 2}.get(fault.kind, 1)


def corrupted(message: bytes, rng: random.Random) -> bytes:
    """Flip one bit of the generation or the number of a message; CURVE guards the rest."""
    altered = bytearray(message)
    altered[rng.randrange(16)] ^= 1 << rng.randrange(8)
    return bytes(altered)


def _strike_bytes(fault: Fault) -> None:
    import spmd_rl.controller.worker_process as worker

    real = worker.WorkerLifecycle

    def through_proxy(endpoint: str, *rest: Any) -> Any:
        return real(proxy(endpoint, fault.after), *rest)

    worker.WorkerLifecycle = through_proxy  # type: ignore[assignment, misc]


def proxy(endpoint: str, after_bytes: int) -> str:
    """Forward a UNIX socket both ways, and return its address.

    One bit of what goes to the controller is flipped after `after_bytes`.
    """
    path = Path(tempfile.mkdtemp(prefix="proxy-")) / "s"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    threading.Thread(
        target=_serve, args=(listener, endpoint.removeprefix("ipc://"), after_bytes), daemon=True
    ).start()
    return f"ipc://{path}"


def _serve(listener: socket.socket, target: str, after_bytes: int) -> None:
    struck = False
    while True:
        near, _ = listener.accept()
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(target)
        except OSError:
            near.close()
            return
        threading.Thread(target=_pump, args=(far, near, None), daemon=True).start()
        threading.Thread(
            target=_pump, args=(near, far, None if struck else after_bytes), daemon=True
        ).start()
        struck = True


def _pump(source: socket.socket, sink: socket.socket, after_bytes: int | None) -> None:
    passed = 0
    try:
        while chunk := bytearray(source.recv(1 << 16)):
            if after_bytes is not None and passed <= after_bytes < passed + len(chunk):
                chunk[after_bytes - passed] ^= 1
                struck_file().touch()
            passed += len(chunk)
            sink.sendall(chunk)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
