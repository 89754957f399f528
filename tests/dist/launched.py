"""`spmd-rl`, or several ranks, in a process forked from one that has imported torch and the
package. These imports are more than half of the processor time of a small run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

# What the launcher, its ranks and a forked controller import, or almost all of it. The module that
# draws curves is left out: sitecustomize.py of tests/fakes/undrawn puts another in its place.
PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api"),
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    *("multiprocessing.queues", "numpy.ma", "pytest", "tokenizers", "tests.dist.forked_controller"),
    *("spmd_rl.cli.command", "spmd_rl.cli.rank", "spmd_rl.cli.main", "spmd_rl.plan.start"),
    *("spmd_rl.cli.launcher", "spmd_rl.controller.lifecycle.forked_ranks"),
    *("spmd_rl.controller.worker_process", "spmd_rl.controller.link", "spmd_rl.check.inputs"),
    *("spmd_rl.check.engine", "spmd_rl.check.inputs", "spmd_rl.hooks.child.main"),
    *("spmd_rl.controller.run.controller_main", "spmd_rl.config.defaults", "spmd_rl.report.build"),
    *("spmd_rl.recipes.policy_run", "spmd_rl.recipes.policy_update", "spmd_rl.recipes.num_steps"),
    *("spmd_rl.recipes.grpo", "spmd_rl.recipes.grpo_async", "spmd_rl.recipes.grpo_fully_async"),
    *("spmd_rl.rollout.build", "spmd_rl.rollout.rollout", "spmd_rl.rollout.native.build"),
    *("spmd_rl.rollout.native.tp.build", "spmd_rl.model.layers.gqa_module"),
    *("spmd_rl.train.build", "spmd_rl.train.training_role", "spmd_rl.train.fsdp2.backend"),
    *(
        "spmd_rl.train.checkpoint.checkpoint",
        "spmd_rl.train.checkpoint.export",
        "spmd_rl.algo.make",
        "spmd_rl.algo.group_metrics",
    ),
    *("spmd_rl.weights.executors", "spmd_rl.weights.proof.verification"),
    "spmd_rl.weights.proof.perturbed_source",
]


Main = Callable[[list[str]], int]


def spmd_rl(words: list[str]) -> int:
    """Be `spmd-rl` with these words, and return the exit code."""
    from spmd_rl.cli.main import main

    sys.argv = ["spmd-rl", *words]
    return main()


def run_script(words: list[str]) -> int:
    """Run a script on several ranks: the words are their number, its path and its arguments."""
    from spmd_rl.cli.launcher import launch

    return launch(int(words[0]), _be_rank, words[1:], max_restarts=0, grace_s=0)


def run_function(words: list[str]) -> int:
    """Call a function on several ranks: the words are their number, a folder and the call."""
    from spmd_rl.cli.launcher import launch

    return launch(int(words[0]), _call, words[1:], max_restarts=0, grace_s=0)


def _be_rank(words: list[str]) -> int:
    sys.argv = words
    return _exit_code(lambda: runpy.run_path(words[0], run_name="__main__"))


def _call(words: list[str]) -> int:
    return _exit_code(lambda: _call_in_world(*words))


def _call_in_world(folder: str, call: str) -> None:
    import torch.distributed as dist

    from spmd_rl.mesh.world import World, join, open_store

    world = World.from_env()
    join(world, open_store(world))
    function, args = pickle.loads(bytes.fromhex(call))
    found = function(world, *args)
    Path(folder, f"{world.rank}.json").write_text(json.dumps(found))
    dist.barrier()  # a rank that ends early would end connections that others still use
    dist.destroy_process_group()


def _exit_code(act: Callable[[], object]) -> int:
    try:
        act()
    except Exception:  # whatever a rank raises ends it with exit code 1
        traceback.print_exc()
        return 1
    return 0


class Launched:
    """A run with the methods of a `subprocess.Popen`, in a process group of its own; `end` it."""

    def __init__(
        self, words: list[str], folder: Path, environment: dict[str, str], main: Main = spmd_rl
    ) -> None:
        context = _server()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        write_ends = tuple(write_end for _, write_end in pipes)
        self._process = context.Process(
            target=_run, args=(main, words, str(folder), environment, write_ends)
        )
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(read_end.fileno())) for read_end, _ in pipes)
        for end in (end for pipe in pipes for end in pipe):
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of an ended run; the negative number of the signal that killed it."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return the rest of stdout and stderr.

        Blocks: until both are closed. Raises: TimeoutError with what it said, after it has ended
        the run.
        """
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                out, err = (read.result(timeout) for read in reads)
            except TimeoutError as error:
                os.killpg(self.pid, signal.SIGKILL)
                said = "".join(read.result() for read in reads)
                raise TimeoutError(f"it ran for {timeout} s, and said:\n{said}") from error
        self._process.join()
        return out, err

    def end(self) -> None:
        """Kill what is left of the process group, and close its streams."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self.stdout.close()
        self.stderr.close()


def _run(
    main: Main,
    words: list[str],
    folder: str,
    environment: dict[str, str],
    ends: tuple[Connection, Connection],
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as if nobody had asked for it yet
    for number, end in enumerate(ends, 1):
        os.dup2(end.fileno(), number)
        end.close()
    _make_torchrun_patient()
    sys.exit(main(words))


def _make_torchrun_patient() -> None:
    """Torchrun kills a rank that has not ended after 30 s: no test shall pass because of that."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    LocalElasticAgent._shutdown.__defaults__ = (signal.SIGTERM, 100_000)


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
        forkserver.ensure_running()
    return context
