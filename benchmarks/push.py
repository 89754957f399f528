"""Push of weights to the native engine in the trainer's process: GPU time, host time, digests.

The masters are float32, the engine's parameters bfloat16, with the shapes of Qwen3. The floor is
the least that has to move: one copy that reads as many float32 numbers and writes them as bfloat16.
The GPU times of both are between CUDA events, behind other work, so that no launch is waited for.
They take turns in the same process. Digests are timed as a push takes them: masters and engine are
read once, and the host waits for the sums of all tensors at once.

The round trip is that of `link.push` in a run of one rank (push_recipe.py): the host's time for a
push that is not compared, while the GPU has nothing else to do, and does not wait for the copies.

    python -m benchmarks.push [--shape 4B] [--save] [--out figures.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from benchmarks.push_recipe import FILE, engine, masters
from benchmarks.ran_files import A_RUN
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import write_config
from benchmarks.table import Row
from spmd_rl.kernels.runtime.interleaved_timing import shuffled_turns
from spmd_rl.weights.ends import LocalEnds
from spmd_rl.weights.executors import Executor
from spmd_rl.weights.local_tensors import LocalTensors
from spmd_rl.weights.plan.moves import plan_moves
from spmd_rl.weights.proof.digest import BoxSums
from spmd_rl.weights.proof.verification import Verifier
from spmd_rl.weights.tensor_ends import TensorSource

PACKAGES = ("torch", "triton")
GPU_BAR, ROUND_TRIP_BAR_MS = 1.2, 3.0
WARM_UPS, TURNS = 5, 20
AHEAD_CYCLES = 20_000_000  # of GPU work, about 10 ms, in which the host queues what is measured
DEVICE = torch.device("cuda")

Work = Callable[[], object]


def gpu_ms(work: Work) -> float:
    """Return the GPU's time for what `work` queues, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def host_ms(work: Work) -> float:
    """Return the host's time for `work`, on an idle GPU."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def medians(timing: Callable[[Work], float], works: dict[str, Work]) -> dict[str, float]:
    """Return each one's median time; they take turns."""
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn, index in shuffled_turns(len(names), WARM_UPS + TURNS):
        found = timing(works[names[index]])
        if turn >= WARM_UPS:
            times[names[index]].append(found)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(shape: str, folder: Path) -> Iterator[Row]:
    torch.manual_seed(0)
    flat, tensors = masters(str(folder), DEVICE)
    copy = torch.empty_like(flat, dtype=torch.bfloat16)
    sink = engine(str(folder), DEVICE).sink()
    source = TensorSource(LocalTensors.whole(tensors).items())
    plan = plan_moves([source.layout(0)], [sink.layout(0)], None, 0)
    ends = LocalEnds(0, source, sink, DEVICE)
    pushes = Executor(plan.moves, ends)
    verifier = Verifier(plan.moves, plan.replicas, ends)
    held = {piece.name: sink.slot(piece.name, piece.box) for piece in sink.layout(0).pieces}

    def one_by_one() -> None:
        for name, tensor in held.items():
            tensor.copy_(tensors[name])

    what = f"Qwen3-{shape}, push of {len(tensors)} tensors to the engine in the same process"
    works: dict[str, Work] = {
        "push": lambda: pushes.run(None),
        "floor": lambda: copy.copy_(flat),
        "torch's list": lambda: torch._foreach_copy_(
            list(held.values()), [tensors[name] for name in held]
        ),
        "one by one": one_by_one,
    }
    on_gpu = medians(gpu_ms, works)
    yield compared(
        f"{what}: GPU time",
        on_gpu["push"],
        "ms",
        peer="one copy of as many numbers",
        peer_value=on_gpu["floor"],
        at_most=GPU_BAR,
    )
    for how in ("torch's list", "one by one"):
        yield measured(f"{what}: GPU time by {how}", on_gpu[how], "ms")
    yield measured(f"{what}: host time to queue it", medians(host_ms, works)["push"], "ms")
    yield from _digests(what, verifier, LocalTensors.whole(tensors), LocalTensors.whole(held))


def _digests(
    what: str, verifier: Verifier, sources: LocalTensors, held: LocalTensors
) -> Iterator[Row]:
    found = verifier.compare(None)
    yield measured(f"{what}: tensors that differ", found.num_unequal, "tensors", at_most=0)
    yield measured(f"{what}: tensors that are equal", found.num_equal, "tensors")
    targets = ["bfloat16"] * len(sources)
    on_gpu = medians(
        gpu_ms,
        {
            "masters": BoxSums(list(sources.values()), targets).run,
            "engine": BoxSums(list(held.values()), targets).run,
        },
    )
    yield measured(f"{what}: GPU time to digest the masters", on_gpu["masters"], "ms")
    yield measured(f"{what}: GPU time to digest the engine's weights", on_gpu["engine"], "ms")
    compare = medians(host_ms, {"compare": lambda: verifier.compare(None)})
    yield measured(f"{what}: time to compare both ends", compare["compare"], "ms")


def round_trips(shape: str, folder: Path) -> Iterator[Row]:
    command = [
        sys.executable,
        "-c",
        "import sys; from spmd_rl.cli.main import main; sys.exit(main())",
        "run",
        "benchmarks.push_recipe",
        "--nproc=1",
        f"--shape={shape}",
        f"--folder={folder}",
        f"--run.folder={folder}",
        "--run.name=push",
    ]
    subprocess.run(command, check=True)
    pushes = json.loads((folder / "push" / FILE).read_text())[2 * WARM_UPS :]
    plain = [push["seconds"] * 1e3 for push in pushes if push["verify_s"] is None]
    verified = [push for push in pushes if push["verify_s"] is not None]
    what = f"Qwen3-{shape}, push in a run of one rank"
    yield measured(
        f"{what}: the controller's round trip",
        statistics.median(plain),
        "ms",
        at_most=ROUND_TRIP_BAR_MS,
    )
    whole = statistics.median(push["seconds"] for push in verified) * 1e3
    yield measured(f"{what}: the whole, copied and compared", whole, "ms")
    compare = statistics.median(push["verify_s"] for push in verified) * 1e3
    yield measured(f"{what}: comparing both ends", compare, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the rows to this file, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(options.shape, folder)
        rows = list(measure(options.shape, folder))
        torch.cuda.empty_cache()
        rows += round_trips(options.shape, folder)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    return finish(
        __file__, PACKAGES, rows, save=options.save, rooms=A_RUN, machine=gpu_machine(), **gpu()
    )


if __name__ == "__main__":
    sys.exit(main())
