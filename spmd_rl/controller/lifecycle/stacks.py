"""Stacks of this process: what each thread executes, and torch's record of collectives."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType

# torch's functions that dump the flight record, by backend; a build may lack either
FLIGHT_RECORDERS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
SERVING = "its wait for hooks or other ranks"
_LIBRARIES = ("<frozen", *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")))
_PACKAGE = str(Path(__file__).parents[2])


def all_stacks() -> str:
    """Return the Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def main_thread_location() -> str:
    """Return the line that the main thread is at, such as "reward.py:12 in score".

    It is the innermost line in a file that is no library. A main thread that asks this itself is
    at no line of a call: it serves messages while hooks or other ranks work.
    """
    if threading.current_thread() is threading.main_thread():
        return SERVING
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(_PACKAGE)


def flight_record() -> bytes:
    """Return torch's records of this process's collectives, by backend, as JSON.

    It is empty in a process that has not loaded torch.distributed.
    """
    if (c10d := sys.modules.get("torch._C._distributed_c10d")) is None:
        return b""
    dumps = {backend: getattr(c10d, name, None) for backend, name in FLIGHT_RECORDERS.items()}
    records = [
        b'"%s":%s' % (backend.encode(), dump())
        for backend, dump in dumps.items()
        if dump is not None
    ]
    return b"{%s}" % b",".join(records)
