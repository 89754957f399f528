"""How a process that cannot go on leaves its one sentence: in torchrun's error file, for whoever started the run."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

ERROR_FILE_ENV = "TORCHELASTIC_ERROR_FILE"


def write(sentence: str) -> None:
    """Leave `sentence` for torchrun's report, and on stderr where torchrun gave no file. The first one stands."""
    path = os.environ.get(ERROR_FILE_ENV)
    if not path:
        print(sentence, file=sys.stderr)
        return
    try:
        with open(path, "x") as file:
            json.dump({"message": sentence, "timestamp": int(time.time())}, file)
    except FileExistsError:
        return


def read(folder: Path) -> list[str]:
    """The sentences under torchrun's log folder, earliest first."""
    files = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    return [json.loads(file.read_text())["message"] for file in files]


def end_process(sentence: str, exit_code: int) -> NoReturn:
    """Leave `sentence` and end now, whatever the other threads are doing."""
    write(sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
