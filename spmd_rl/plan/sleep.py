"""Decision whether the roles of a run sleep in turn, and the sentence that says why."""

from __future__ import annotations

import ctypes
from typing import Any

from spmd_rl.controller.sleepers import SleepPolicy
from spmd_rl.offload.config import OffloadConfig
from spmd_rl.offload.phases import CONCURRENT, Phases


def decide_sleep(cfg: Any, world_size: int) -> tuple[SleepPolicy, str]:
    """Return the policy of a run of `world_size` ranks like this process's, and why it is so."""
    return sleep_policy(cfg, world_size, gpu_bytes())


def sleep_policy(cfg: Any, world_size: int, gpu_bytes: int | None) -> tuple[SleepPolicy, str]:
    """Return the policy of a run on GPUs of `gpu_bytes` (None: on CPUs), and why it is so.

    The sentence is "" where the recipe declares no phases: then it says itself who is awake.
    """
    phases: Phases = getattr(cfg, "phases", CONCURRENT)
    offload: OffloadConfig = getattr(cfg, "offload", OffloadConfig(sleep="always"))
    policy = SleepPolicy(phases=phases, host_bytes=offload.host_bytes)
    awake = SleepPolicy(sleeps=False)
    if offload.sleep == "never":
        return awake, "nothing sleeps: offload.sleep = never"
    if not phases.roles:
        return policy, ""
    if offload.sleep == "always":
        return policy, "roles sleep in turn: offload.sleep = always"
    if gpu_bytes is None:
        return awake, "nothing sleeps: on CPUs, memory is not given back"
    return policy, "roles sleep in turn: offload.sleep = auto, on GPUs"


def gpu_bytes() -> int | None:
    """Return the memory of this process's first GPU; None where it sees none. It needs no torch,
    and makes no context.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    return size.value
