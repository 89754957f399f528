"""Starting ranks, as children that this process owns and ends."""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.dist.launched import Launched, Main, run_function, run_script
from tests.shared_gpus import sharing

ROOT = Path(__file__).parents[2]


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Return what `function(world, *args)` returns on each of the gloo ranks, as JSON has it.

    The function is one of a module. Blocks: as `torchrun`.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = [str(num_ranks), folder, pickle.dumps((function, args)).hex()]
        _run(words, num_ranks, run_function, timeout_s=1000)
        files = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        return [json.loads(file.read_text()) for file in files]


def torchrun(
    script: str, num_ranks: int, out: Path, *args: str, timeout_s: float = 1000, room: str = "dist"
) -> dict[str, Any]:
    """Run `tests/<room>/<script>` on that many ranks and return the JSON it wrote to `out`.

    The ranks are those of torchrun's agent, forked from a process that has imported torch. On GPUs
    they share these where there are too few.
    Blocks: until they end; after `timeout_s` their process group is killed and the test fails.
    """
    words = [str(num_ranks), str(ROOT / "tests" / room / script), *args]
    _run(words, num_ranks, run_script, timeout_s)
    return json.loads(out.read_text())


def _run(words: list[str], num_ranks: int, main: Main, timeout_s: float) -> None:
    search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": search} | sharing(num_ranks)
    process = Launched(words, ROOT, environment, main)
    try:
        said = process.communicate(timeout_s)
    finally:
        process.end()
    assert process.returncode == 0, "".join(said)
