"""Starting a test script under torchrun as a child that this process owns and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def torchrun(
    script: str, num_ranks: int, out: Path, *args: str, timeout_s: float = 1000, room: str = "dist"
) -> dict[str, Any]:
    """Run `tests/<room>/<script>` on that many ranks and return the JSON it wrote to `out`.

    Blocks: until torchrun ends; after `timeout_s` its process group is killed and the test fails.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [*command, str(ROOT / "tests" / room / script), *args],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    assert child.returncode == 0, output
    return json.loads(out.read_text())
