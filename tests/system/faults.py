"""Faults between our code and ZeroMQ, and below it: installed in a process by the environment that
started it.

FAULT is JSON: the `kind`, the `side` it strikes ("controller" or a rank), and after how many frames
or bytes. Nothing of the product knows of this file: it changes what sending a message does in this
process, or puts a proxy that corrupts bytes between a rank and the address it dials.
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
    side: str  # "controller", "0", "1" ...
    after: int  # frames sent before it strikes
    seconds: float = 0.0  # of a delay
    seed: int = 0

    def text(self) -> str:
        return json.dumps(self.__dict__)


def given() -> Fault | None:
    text = os.environ.get(ENVIRONMENT)
    return Fault(**json.loads(text)) if text else None


def install_in_controller() -> None:
    """Call it where the recipe is imported; does nothing unless this process is the controller a
    fault is meant for.
    """
    fault = given()
    if fault is not None and fault.side == "controller":
        _strike_frames(fault)


def install_in_rank() -> None:
    """Call it in a rank before it dials."""
    fault = given()
    if fault is None or fault.side != os.environ.get("RANK"):
        return
    if fault.kind == "bytes":
        _strike_bytes(fault)
    else:
        _strike_frames(fault)


def _strike_frames(fault: Fault) -> None:
    """In the one place where this side sends: the controller imports the recipe, but ranks do as
    well.
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
    """Its time is when the fault struck."""
    return Path(tempfile.gettempdir()) / "struck"


def _altered(fault: Fault, message: bytes) -> list[bytes]:
    """What is sent in place of a message."""
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    if fault.kind == "corrupt":
        return [corrupted(message, random.Random(fault.seed))]
    return [message] * {"drop": 0, "duplicate": 2}.get(fault.kind, 1)


def corrupted(message: bytes, rng: random.Random) -> bytes:
    """The run's generation or the message's number with one bit turned; the rest is CURVE's to
    guard.
    """
    altered = bytearray(message)
    altered[rng.randrange(16)] ^= 1 << rng.randrange(8)
    return bytes(altered)


def _strike_bytes(fault: Fault) -> None:
    import spmd_rl.controller.worker as worker

    real = worker.WorkerLifecycle

    def through_proxy(endpoint: str, *rest: Any) -> Any:
        return real(proxy(endpoint, fault.after), *rest)

    worker.WorkerLifecycle = through_proxy  # type: ignore[assignment, misc]


def proxy(endpoint: str, after_bytes: int) -> str:
    """Forward a UNIX socket both ways, turning one bit of what goes to the controller after that
    many bytes.
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
