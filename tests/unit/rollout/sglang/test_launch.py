"""The child's process: its environment, its start and its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from spmd_rl.errors import ConfigError, LostRankError, SpmdError
from spmd_rl.model.hf import random_weights, save_folder
from spmd_rl.model.read import read_spec
from spmd_rl.rollout.interpreter import Interpreter, meeting_environment
from spmd_rl.rollout.sglang.build import build, start
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.launch import ChildWorld, clean_environment
from spmd_rl.rollout.sglang.messages import ChildReady
from spmd_rl.rollout.sglang.options import SglangSite
from tests.fakes.sglang_child import write_site
from tests.listeners import open_ports
from tests.unit.rollout.sglang.conftest import CPU

REPO = Path(__file__).parents[4]
LAST_RESORT_S = 120.0
POISON = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "ROLE_RANK": "3",
    "MASTER_ADDR": "203.0.113.1",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_FR_BUFFER_SIZE": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NCCL_ALGO": "Tree",
    "SGLANG_DP_RANK": "5",
    "SGLANG_USE_PICKLE_IPC": "1",
}
HOLDER = """
import sys
from pathlib import Path
import torch
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
engine = build(SglangEngineConfig(python=sys.argv[1]), sys.argv[2], torch.device("cpu"))
print(engine.child.pid, flush=True)
sys.stdin.read()
"""


def wait_for_end(pid_fd: int) -> bool:
    """Wait for the end of any process, ours or not."""
    return bool(select.select([pid_fd], [], [], LAST_RESORT_S)[0])


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("size", "of_nccl"), [(1, {}), (2, {"NCCL_ALGO": "Tree"})])
def test_the_environment_of_the_world_is_left_out(size: int, of_nccl: dict[str, str]) -> None:
    site = SglangSite("0.5.16", (), "/lib/saver.so")
    world = ChildWorld(size - 1, size, Path("/private/store"))
    made = clean_environment(POISON | {"HOME": "/h"}, world, Interpreter("python", "/site"), site)
    assert made["HOME"] == "/h"
    kept = {name: made[name] for name in POISON if name in made}
    assert kept == {
        "RANK": str(size - 1),
        "WORLD_SIZE": str(size),
        "SGLANG_USE_PICKLE_IPC": "0",
        **of_nccl,
    }
    assert made["LD_PRELOAD"] == "/lib/saver.so"
    assert made["PYTHONPATH"] == "/site"


def test_an_engine_opens_no_port(new_engine: Callable[..., SglangEngine]) -> None:
    before = open_ports(os.getpid())
    engine = new_engine()
    assert is_running(engine.child.pid)
    assert open_ports(os.getpid()) == before


def test_schedulers_meet_in_a_file(tmp_path: Path) -> None:
    method = meeting_environment(tmp_path / "store")["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    first, second = (next(rendezvous(method, rank, 2))[0] for rank in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert (tmp_path / "store").is_file()


def test_a_poisoned_environment_starts(
    new_engine: Callable[..., SglangEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in POISON.items():
        monkeypatch.setenv(name, value)
    assert not new_engine().has_work


@pytest.mark.parametrize("number", [10, pytest.param(50, marks=pytest.mark.system)])
def test_many_starts_and_stops_leave_no_orphan(folder: Path, site: Path, number: int) -> None:
    pids = []
    for _ in range(number):
        engine = build(SglangEngineConfig(python=str(site)), str(folder), CPU)
        pids.append(engine.child.pid)
        engine.close()
    assert len(set(pids)) == number
    assert not any(map(is_running, pids))


def test_two_children_start_at_once(folder: Path, site: Path) -> None:
    """Both run before either is told what to do, as on two ranks of one host."""
    cfg = SglangEngineConfig(python=str(site))
    for _ in range(6):
        started = [start(cfg, str(folder), CPU, rank=rank) for rank in range(2)]
        try:
            for one in started:
                one.child.socket.send(one.spec)
            for one in started:
                assert isinstance(one.child.socket.receive(LAST_RESORT_S), ChildReady)
        finally:
            for one in started:
                one.stop()


def test_a_killed_rank_takes_its_child_with_it(folder: Path, site: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(site), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = os.pidfd_open(int(holder.stdout.readline()))
        try:
            holder.kill()
            assert wait_for_end(child)
        finally:
            os.close(child)


def test_a_killed_child_is_one_sentence(new_engine: Callable[..., SglangEngine]) -> None:
    engine = new_engine(options={"fake_steps": 0})
    os.kill(engine.child.pid, signal.SIGKILL)
    sentence = (
        rf"^the SGLang process of rank 0 \(pid {engine.child.pid}\) ended with exit code -9 "
        r"\(SIGKILL\); its output says why$"
    )
    with pytest.raises(LostRankError, match=sentence):
        engine.sleep()
    engine.close()


def test_a_child_that_exits_is_one_sentence(new_engine: Callable[..., SglangEngine]) -> None:
    engine = new_engine()
    engine.client.start_call("fake_exit", code=7)
    with pytest.raises(LostRankError, match=r"ended with exit code 7; its output says why"):
        engine.client.finish_call("fake_exit", LAST_RESORT_S)


def test_a_failed_start_says_why_and_leaves_nothing(
    new_engine: Callable[..., SglangEngine],
) -> None:
    with pytest.raises(SpmdError, match="SGLang's scheduler ended: ValueError: no such kernel"):
        new_engine(options={"fake_failure": "no such kernel"})


def test_a_child_of_another_version_than_its_metadata_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    site = write_site(tmp_path)
    (site / "sglang/__init__.py").write_text("__version__ = '0.5.23'\n")
    with pytest.raises(
        SpmdError, match=r"SGLang 0\.5\.23 is none of the versions 0\.5\.16, 0\.5\.17"
    ):
        build(SglangEngineConfig(python=str(site)), str(folder), CPU)


def test_structs_with_other_fields_are_refused(folder: Path, tmp_path: Path) -> None:
    site = write_site(tmp_path)
    path = site / "sglang/srt/server_args.py"
    path.write_text(path.read_text().replace("abort_all: bool = False", "every: bool = False"))
    with pytest.raises(SpmdError, match="SGLang's AbortReq begins with the fields rid,"):
        build(SglangEngineConfig(python=str(site)), str(folder), CPU)


def test_a_thread_cannot_start_a_child(folder: Path, site: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(build, SglangEngineConfig(python=str(site)), str(folder), CPU)
        with pytest.raises(SpmdError, match="from the main thread"):
            future.result()


def test_the_rank_never_imports_sglang(new_engine: Callable[..., SglangEngine]) -> None:
    new_engine()
    assert "sglang" not in sys.modules


def test_a_folder_in_block_fp8_is_refused(folder: Path, site: Path, tmp_path: Path) -> None:
    like = tmp_path / "fp8"
    save_folder(like, folder, random_weights(read_spec(folder), 0), torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match="is in block FP8, and SGLang"):
        build(SglangEngineConfig(python=str(site)), str(like), CPU)


def test_options_are_checked_before_a_child_starts(
    new_engine: Callable[..., SglangEngine],
) -> None:
    with pytest.raises(ConfigError, match="fake_step is no option"):
        new_engine(options={"fake_step": 0})
