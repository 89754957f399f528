"""Run of tests/gpu on all GPUs of this host, file by file, which goes on where the last one ended.

    python -m benchmarks.run_gpu_tests runs/gpu [tests/gpu/train ...] [--limit-s 540]

`runs/gpu` gets a report and a log of each file of tests. A file that has a report there is passed
over: after a limit in time the same command runs the rest. Use a new folder for new code. Tests
that are marked `alone` come last, when nothing else runs on their GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_tests import OUTCOMES, read_tests
from benchmarks.table import RESULTS, read_results

ROOT = Path(__file__).parents[1]
TESTS = "tests/gpu"
MOST_WORKERS = 18  # that share a GPU: each has a context, and some GB of weights or pages
PER_CORE = 9 / 8  # workers: now and then each waits for its GPU
WORKERS = {"kernels": 4, "recipes": 3}  # of a file: kernels compile, recipes start processes
ALONE = "alone"  # the mark of tests that have a GPU for themselves, in a run of their own
HOST_THREADS = 4  # of a process of tests: with a thread a core each, all would wait for each other
USUAL_S = 60.0  # of a file that no result knows
END_S = 20.0  # for fixtures to end what they have started
UNFINISHED = "no report"
# one writes no cache beside another, and pytest-benchmark warns of workers
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark")


# how many GPUs a file wants, if more than one
NUM_GPUS = {
    "recipes/test_sglang.py": 4,
    "train/test_megatron.py": 4,
    "recipes/test_two_gpus.py": 2,
    "train/test_expert_ranks.py": 4,
    "recipes/test_expert_engines.py": 4,
    "train/test_shared_ranks.py": 2,
    "train/test_tensor_ranks.py": 2,
    "rollout/test_shared_models.py": 8,
    "recipes/test_shared_models.py": 4,
    "train/test_optimizers.py": 2,
}


class GpuFile(NamedTuple):
    """Tests of a file: its path below tests/gpu, the GPUs that they want, and how long they take.

    Those that are marked `alone`, as they measure a GPU's free memory, are an entry of their own.
    """

    name: str
    num_gpus: int = 1
    alone: bool = False
    seconds: float = USUAL_S

    @property
    def stem(self) -> str:
        stem = self.name.removesuffix(".py").replace("/", ".")
        return f"{stem}.{ALONE}" if self.alone else stem

    @property
    def expected_s(self) -> float:
        """How long it may take: files in kernels/ are shared among their workers."""
        return self.seconds / self.workers if self.name.startswith("kernels/") else self.seconds

    @property
    def workers(self) -> int:
        return 1 if self.alone else WORKERS.get(self.name.partition("/")[0], 1)


class Host:
    """GPUs of this host, and which tests run on them, in so many workers a GPU.

    A file that wants more GPUs than there are gets all, and its ranks share them.
    """

    def __init__(self, gpus: list[str], workers: int) -> None:
        self._running: dict[str, list[GpuFile]] = {gpu: [] for gpu in gpus}
        self._workers = workers

    def place(self, file: GpuFile) -> list[str]:
        """Return the GPUs on which `file` starts now, and count it there; none if it must wait."""
        free = [gpu for gpu, others in self._running.items() if self._fits(file, others)]
        chosen = sorted(free, key=lambda gpu: _taken(self._running[gpu]))[: file.num_gpus]
        if len(chosen) < min(file.num_gpus, len(self._running)):
            return []
        for gpu in chosen:
            self._running[gpu].append(file)
        return chosen

    def leave(self, file: GpuFile) -> None:
        for others in self._running.values():
            if file in others:
                others.remove(file)

    def _fits(self, file: GpuFile, others: list[GpuFile]) -> bool:
        if file.alone or any(other.alone for other in others):
            return not others
        return not others or _taken(others) + file.workers <= self._workers


def _taken(files: list[GpuFile]) -> int:
    return sum(file.workers for file in files)


def files_of(tests: Iterable[str]) -> list[GpuFile]:
    """Return the files at or below the paths `tests`, in the order in which they should start.

    The longest come first, and tests that want to be alone last.
    """
    root = ROOT / TESTS
    wanted = [(ROOT / one).resolve() for one in tests]
    times = last_times()
    entries = []
    for path in root.rglob("test_*.py"):
        if any(path.is_relative_to(one) for one in wanted):
            name = path.relative_to(root).as_posix()
            gpus, seconds = NUM_GPUS.get(name, 1), times.get(name, USUAL_S)
            entries.append(GpuFile(name, gpus, seconds=seconds))
            if f"pytest.mark.{ALONE}\n" in path.read_text():
                entries.append(GpuFile(name, gpus, alone=True))
    return sorted(entries, key=lambda file: (file.alone, -file.expected_s, file.name))


def last_times() -> dict[str, float]:
    """Return the seconds of each file below tests/gpu, as the committed results have them."""
    return {
        row.what.removesuffix(": time").removeprefix(f"{TESTS}/"): row.value
        for result in read_results(RESULTS)
        if result.script == "gpu_tests.py"
        for row in result.rows
        if row.what.endswith(": time")
    }


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA may use here, by CUDA_VISIBLE_DEVICES or else all."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [one for one in chosen.split(",") if one]
    listed = subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines()
    return [str(index) for index, line in enumerate(listed) if line.startswith("GPU ")]


def workers_of(num_gpus: int) -> int:
    """Return how many processes of tests share a GPU of this host."""
    return max(1, min(MOST_WORKERS, int(PER_CORE * (os.cpu_count() or 1)) // max(1, num_gpus)))


def run_file(file: GpuFile, gpus: list[str], out: Path, give_up_at: float) -> str:
    """Run one file on `gpus`, and return the last line that pytest wrote, or `UNFINISHED`.

    Blocks: until pytest ends, which is ended by a signal at `give_up_at` (of `time.monotonic`).
    """
    report, unfinished = out / f"{file.stem}.xml", out / f"{file.stem}.unfinished"
    unfinished.unlink(missing_ok=True)
    chosen = ["-m", ALONE if file.alone else f"not {ALONE}"]
    if file.name.startswith("kernels/"):
        chosen += ["-n", str(file.workers)]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *chosen, f"--junitxml={unfinished}"]
    with (out / f"{file.stem}.log").open("w+") as log:
        process = subprocess.Popen(
            [*command, f"{TESTS}/{file.name}"],
            cwd=ROOT,
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "OMP_NUM_THREADS": str(HOST_THREADS)},
            stdout=log,
            stderr=log,
        )
        in_time = ended(process, give_up_at)
        log.seek(0)
        lines = log.read().splitlines()
    if not in_time or not unfinished.exists():
        return UNFINISHED
    unfinished.rename(report)
    return lines[-1]


def ended(process: subprocess.Popen[bytes], give_up_at: float) -> bool:
    """Wait until a process ends, and return True; end it at `give_up_at`, and return False."""
    try:
        process.wait(max(0.0, give_up_at - time.monotonic()))
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def run(waiting: list[GpuFile], host: Host, out: Path, limit_s: float) -> dict[GpuFile, str]:
    """Run the files, each as soon as there is room, and return how each that started ended."""
    give_up_at = time.monotonic() + limit_s
    running: dict[Future[str], GpuFile] = {}
    ends: dict[GpuFile, str] = {}
    waiting = list(waiting)
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        while waiting or running:
            # in order: files of few workers would leave none to those of many
            while waiting and time.monotonic() < give_up_at and (gpus := host.place(waiting[0])):
                file = waiting.pop(0)
                running[pool.submit(run_file, file, gpus, out, give_up_at)] = file
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                file = running.pop(done)
                host.leave(file)
                ends[file] = done.result()
                print(f"{file.stem}: {ends[file]}", flush=True)
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder of reports and logs")
    parser.add_argument("tests", nargs="*", default=[TESTS], help="files or folders of tests")
    parser.add_argument("--limit-s", type=float, default=540.0, help="when tests are ended")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.resolve()
    chosen = files_of(options.tests)
    if not chosen:
        parser.error(f"no file of tests is at {' '.join(options.tests)}: name some of {TESTS}")
    waiting = [file for file in chosen if not reported(file, out)]
    gpus = visible_gpus()
    run(waiting, Host(gpus, workers_of(len(gpus))), out, options.limit_s)
    return summary(chosen, out)


def reported(file: GpuFile, out: Path) -> bool:
    return (out / f"{file.stem}.xml").exists()


def summary(chosen: list[GpuFile], out: Path) -> int:
    """Print which tests failed and which files are left, and return the exit code."""
    done = [file for file in chosen if reported(file, out)]
    for file in done:
        for line in (out / f"{file.stem}.log").read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                print(line)
    tests = read_tests(*(out / f"{file.stem}.xml" for file in done))
    counts = (f"{sum(test.outcome == one for test in tests)} {one}" for one in OUTCOMES)
    print(f"{', '.join(counts)} in {len(done)} of {len(chosen)} files", end="; ")
    left = [file.stem for file in chosen if file not in done]
    print(f"run this again for {', '.join(left)}" if left else f"the reports are {out}/*.xml")
    return int(bool(left) or any(test.outcome == "failed" for test in tests))


if __name__ == "__main__":
    sys.exit(main())
