"""How a process that cannot go on leaves its one sentence: in torchrun's error file, for whoever
started the run.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from spmd_rl.mesh.private_folder import leave_meeting_folder

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
# set where `spmd-rl run` started the ranks: it reads what they leave
LAUNCHER_ENV = "SPMD_RL_LAUNCHER"
DONE_FILE_ENV = "SPMD_RL_DONE_FILE"
WORDS_S, POLL_S = 3.0, 0.02  # for the controller to notice that the last rank is gone, and say so
ATTEMPT = "attempt_"  # torchrun's log folder has one of these for each start of the ranks
LEAVE_S = 5.0  # for what was started here to end, once the run has

_launchers: list[int] = []  # of this rank; empty in every other process


def write(sentence: str) -> None:
    """Leave `sentence` for torchrun's report. The first one stands.

    It goes to stderr where the report has no place for it, or where the launcher that would read it
    is gone. It is a single line, whatever a library's error has put into it.
    """
    sentence = "; ".join(line.strip() for line in sentence.splitlines() if line.strip())
    path = os.environ.get(ERROR_FILE_ENV)
    launcher_lost = os.getppid() not in (_launchers or [os.getppid()])
    if not (path and _left(Path(path), sentence)) or launcher_lost:
        print(sentence, file=sys.stderr)


def write_alone(sentence: str) -> None:
    """Leave `sentence` where no rank is left to do so: a plain torchrun tells nothing if all ended
    with exit code 0.
    """
    write(sentence)
    if ERROR_FILE_ENV in os.environ and LAUNCHER_ENV not in os.environ:
        print(sentence, file=sys.stderr)


def note_launcher() -> None:
    """Remember who reads the error file of this rank: the parent that it has as it starts."""
    _launchers[:] = [os.getppid()]


def mark_done() -> None:
    """Leave the mark of a run that is over in order, for a batch script that asks for it."""
    if path := os.environ.get(DONE_FILE_ENV):
        Path(path).touch()


def are_not_of_children() -> None:
    """Have whatever is forked from here leave its words to its own stderr: it ends without the run."""
    os.register_at_fork(after_in_child=lambda: os.environ.pop(ERROR_FILE_ENV, None))


def _left(path: Path, sentence: str) -> bool:
    """Whether there is a whole record now; torchrun itself fails on half of one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
        os.link(part, path)
    # another's words stand; or were told, and torchrun's folder is gone
    except (FileExistsError, FileNotFoundError):
        return True
    except OSError:  # the disk is full
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def of_the_last_start(folder: Path) -> list[str]:
    """The sentences that the ranks left under torchrun's log folder when they ended for good,
    earliest first.
    """
    starts = sorted(folder.rglob(f"{ATTEMPT}*"), key=_number)
    return _read(starts[-1]) if starts else []


def of_the_start_before() -> str:
    """Why torchrun has started the ranks of this node again: what the first that failed said.

    Blocks: until that is known, `WORDS_S` at most.
    """
    here = next(
        (path for path in Path(os.environ.get(ERROR_FILE_ENV, "")).parents if ATTEMPT in path.name),
        None,
    )
    said = (
        awaited(lambda: _read(here.with_name(f"{ATTEMPT}{_number(here) - 1}")), WORDS_S)
        if here
        else []
    )
    return said[0] if said else "those before ended without a word here"


def awaited(read: Callable[[], list[str]], wait_s: float) -> list[str]:
    """What `read` gives. Blocks: until that is something, `wait_s` at most."""
    end = time.monotonic() + wait_s
    while not (words := read()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return words


def _number(start: Path) -> int:
    return int(start.name.removeprefix(ATTEMPT))


def _read(start: Path) -> list[str]:
    files = sorted(start.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text())["message"] for file in files]


def leave(who: str, exit_code: int) -> int:
    """The run is over: have this process end by `exit_code` within `LEAVE_S`, whatever user code
    has started in it.

    A reward function's pool, with a request that nobody answers, would hold it for ever.
    """
    limit = threading.Timer(LEAVE_S, _abandon, [who, exit_code])
    limit.daemon = True
    limit.start()
    return exit_code


def _abandon(who: str, exit_code: int) -> NoReturn:
    threads = {thread for thread in threading.enumerate() if not thread.daemon} - {
        threading.main_thread()
    }
    left = [thread.name for thread in threads] + [
        child.name for child in multiprocessing.active_children()
    ]
    print(
        f"{who} has ended without what still ran in it: {', '.join(left) or 'an exit handler'}",
        file=sys.stderr,
    )
    _end(exit_code)


def end_process(sentence: str, exit_code: int) -> NoReturn:
    """Leave `sentence` and end now, whatever the other threads are doing."""
    write(sentence)
    _end(exit_code)


def _end(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # such as a reward function's pool: it does not end by itself
    for child in multiprocessing.active_children():
        child.kill()
    leave_meeting_folder()
    os._exit(exit_code)
