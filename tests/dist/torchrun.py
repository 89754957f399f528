"""Starting a test script on several ranks, as a child that this process owns and ends."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.dist.launched import Launched, run_script
from tests.shared_gpus import sharing

ROOT = Path(__file__).parents[2]


def torchrun(
    script: str, num_ranks: int, out: Path, *args: str, timeout_s: float = 1000, room: str = "dist"
) -> dict[str, Any]:
    """Run `tests/<room>/<script>` on that many ranks and return the JSON it wrote to `out`.

    The ranks are those of torchrun's agent, forked from a process that has imported torch. On GPUs
    they share these where there are too few.
    Blocks: until they end; after `timeout_s` their process group is killed and the test fails.
    """
    words = [str(num_ranks), str(ROOT / "tests" / room / script), *args]
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search} | sharing(num_ranks)
    process = Launched(words, ROOT, environment, run_script)
    try:
        said = process.communicate(timeout_s)
    finally:
        process.end()
    assert process.returncode == 0, "".join(said)
    return json.loads(out.read_text())
