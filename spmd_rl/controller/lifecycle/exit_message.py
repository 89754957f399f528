"""Exit message: the one sentence in which a process says why it ends, for whoever started the run.

It is left in torchrun's error file, where the launcher or a later start of the ranks reads it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from spmd_rl.controller.lifecycle.process_tree import is_ending
from spmd_rl.errors import printable

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
# set where `spmd-rl run` started the ranks, which reads what they leave
LAUNCHER_ENV = "SPMD_RL_LAUNCHER"
# for the controller to notice that the last rank is gone, and to leave its message
WAIT_S, POLL_S = 3.0, 0.02
# torchrun's log folder has one folder of this name for each start of the ranks
ATTEMPT = "attempt_"

_launcher_pids: list[int] = []  # the launcher of this rank; empty in every other process


def write(sentence: str) -> None:
    """Leave `sentence` for torchrun's report, on a single line. The first message stands.

    It goes to stderr where the report has no place for it, or where the launcher that would read it
    has ended or is ending.
    """
    sentence = printable("; ".join(map(str.strip, filter(str.strip, sentence.splitlines()))))
    path = os.environ.get(ERROR_FILE_ENV)
    launcher_lost = any(os.getppid() != pid or is_ending(pid) for pid in _launcher_pids)
    if not (path and _write_record(Path(path), sentence)) or launcher_lost:
        print(sentence, file=sys.stderr)


def write_for_all_ranks(sentence: str) -> None:
    """Leave `sentence` where no rank is left to do so.

    A plain torchrun reports nothing if all ranks ended with exit code 0, so it goes to stderr too.
    """
    write(sentence)
    if ERROR_FILE_ENV in os.environ and LAUNCHER_ENV not in os.environ:
        print(printable(sentence), file=sys.stderr)


def remember_launcher() -> None:
    """Remember the parent of this rank as its launcher, which reads the error file."""
    _launcher_pids[:] = [os.getppid()]


def disown_children() -> None:
    """Have processes forked from here write to their own stderr, since they do not end the run."""
    os.register_at_fork(after_in_child=lambda: os.environ.pop(ERROR_FILE_ENV, None))


def read_last_start(folder: Path) -> list[str]:
    """Return the messages of the last start of the ranks, earliest first.

    `folder` is torchrun's log folder.
    """
    starts = sorted(folder.rglob(f"{ATTEMPT}*"), key=_attempt_number)
    return _read(starts[-1]) if starts else []


def reason_of_restart() -> str:
    """Return why torchrun restarted the ranks of this node: the first message of the last start.

    Blocks: until there is one, `WAIT_S` at most.
    """
    parents = Path(os.environ.get(ERROR_FILE_ENV, "")).parents
    this_start = next((path for path in parents if ATTEMPT in path.name), None)
    messages = []
    if this_start is not None:
        last_start = this_start.with_name(f"{ATTEMPT}{_attempt_number(this_start) - 1}")
        messages = wait_for(lambda: _read(last_start), WAIT_S)
    return messages[0] if messages else "the ranks before left no message on this node"


def wait_for(read: Callable[[], list[str]], wait_s: float) -> list[str]:
    """Return what `read` returns. Blocks: until that is not empty, `wait_s` at most."""
    end = time.monotonic() + wait_s
    while not (messages := read()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return messages


def _write_record(path: Path, sentence: str) -> bool:
    """Return whether there is a whole record now; torchrun itself fails on a partial one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
        os.link(part, path)
    # an earlier message stands, or was read and torchrun's folder removed
    except (FileExistsError, FileNotFoundError):
        return True
    except OSError:  # the disk is full
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def _attempt_number(start: Path) -> int:
    return int(start.name.removeprefix(ATTEMPT))


def _read(start: Path) -> list[str]:
    files = sorted(start.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    messages = [json.loads(file.read_text())["message"] for file in files]
    # torch's own record of an exception holds a table in place of the sentence
    return [text["message"] if isinstance(text, dict) else text for text in messages]
