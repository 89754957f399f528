"""How a process that cannot go on leaves its one sentence: in torchrun's error file, for whoever started the run."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"
ATTEMPT = "attempt_"  # torchrun's log folder has one of these for each start of the ranks


def write(sentence: str) -> None:
    """Leave `sentence` for torchrun's report, and on stderr where that has no place for it. The first one stands."""
    path = os.environ.get(ERROR_FILE_ENV)
    if not (path and _left(Path(path), sentence)):
        print(sentence, file=sys.stderr)


def _left(path: Path, sentence: str) -> bool:
    """Whether there is a whole record now; torchrun itself fails on half of one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))
        os.link(part, path)
    except FileExistsError:
        return True
    except OSError:  # the disk is full
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def of_the_last_start(folder: Path) -> list[str]:
    """The sentences that the ranks left under torchrun's log folder when they ended for good, earliest first."""
    starts = sorted(folder.rglob(f"{ATTEMPT}*"), key=_number)
    return _read(starts[-1]) if starts else []


def of_the_start_before() -> str:
    """Why torchrun has started the ranks of this node again: what the first that failed said."""
    here = next((path for path in Path(os.environ.get(ERROR_FILE_ENV, "")).parents if ATTEMPT in path.name), None)
    said = _read(here.with_name(f"{ATTEMPT}{_number(here) - 1}")) if here else []
    return said[0] if said else "those before ended without a word here"


def _number(start: Path) -> int:
    return int(start.name.removeprefix(ATTEMPT))


def _read(start: Path) -> list[str]:
    files = sorted(start.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text())["message"] for file in files]


def end_process(sentence: str, exit_code: int) -> NoReturn:
    """Leave `sentence` and end now, whatever the other threads are doing."""
    write(sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # such as a reward function's pool: it does not end by itself
        child.kill()
    os._exit(exit_code)
