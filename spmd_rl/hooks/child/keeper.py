"""Keeper of an agent's program: a process above it, below which all that it starts stays.

It becomes the parent of what loses its own there, whatever session or environment that has. Its
stdin has the number of the program's words, the words and the variables, with a zero byte after
each. The descriptor that its argument names is told why the program did not start, and its exit
code. It ends once nothing is left. It imports little, because it starts in each episode.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Start the program, tell how it ends, and reap all others. Blocks: until nothing is left."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told = int(sys.argv[1])
    os.set_inheritable(told, False)
    number, *given, _ = sys.stdin.buffer.read().split(b"\0")
    words, variables = given[: int(number)], given[int(number) :]
    environment = dict(one.split(b"=", 1) for one in variables)
    null = subprocess.DEVNULL
    try:
        program = subprocess.Popen(words, env=environment, stdin=null, start_new_session=True)
    except OSError as error:
        os.write(told, f"{error}\n".encode(errors="replace"))
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the program's output is its own to close
        os.dup2(nowhere, stream)
    with suppress(ChildProcessError):  # nothing is left
        while True:
            pid, status = os.wait()
            if pid == program.pid:
                os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
                os.close(told)


if __name__ == "__main__":
    main()
