"""What a run asks of the plan when it starts: whether its roles sleep, and the room for pages.

Also what it says at its start of a trainer that is not FSDP2's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from spmd_rl.controller.sleepers import SleepPolicy
from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.shared_gpus import ranks_per_gpu
from spmd_rl.mesh.world import World
from spmd_rl.model.foreign.names import NOT_COMPARED, is_foreign
from spmd_rl.model.formats.coded_cache import format_sentences
from spmd_rl.offload.host_limit import host_bytes_left
from spmd_rl.plan.needs import RunNeeds
from spmd_rl.plan.resolve import GPUS_PER_HOST, planned_settings, resolve, row_shards
from spmd_rl.plan.sleep import effective_phases


def decide_start(cfg: object, world_size: int) -> tuple[SleepPolicy, list[str]]:
    """Return the policy of a run of `world_size` ranks like this process's, and what to say of it.

    The sentences say that bits are not compared if transformers computes the model, why the policy
    is so, which backend trains if it is not FSDP2, and what is in few bits.
    Raises: as `sleep_policy`.
    """
    policy, why = sleep_policy(cfg, world_size, gpu_bytes(), host_bytes_left())
    needs = RunNeeds.of(cfg)
    trainer, bits = needs.trainer, NOT_COMPARED if is_foreign(needs.model) else ""
    backend = "" if trainer is None else trainer.backend.describe()
    formats = {} if trainer is None else format_sentences(trainer)
    said = bits, backend, *(f"{name} {sentence}" for name, sentence in formats.items()), why
    return policy, [sentence for sentence in said if sentence]


def settings(cfg: object, world_size: int) -> Mapping[str, Mapping[str, int]]:
    """Return the settings that the plan adds to a spawn, on GPUs like this process's."""
    planned = planned_settings(cfg, world_size, gpu_bytes(), ranks_per_host())
    shards = row_shards(cfg, world_size)
    return {
        name: {**planned.get(name, {}), **({"row_shards": shards[name]} if name in shards else {})}
        for name in planned.keys() | shards.keys()
    }


def sleep_policy(
    cfg: object, world_size: int, gpu_bytes: int | None, host_bytes: int | None = None
) -> tuple[SleepPolicy, str]:
    """Return the policy of a run on GPUs of `gpu_bytes` (None: on CPUs), and why it is so.

    A rank may keep `host_bytes` in host memory; None: that is not known. The sentence is "" where
    the recipe declares no phases: then it says itself who is awake. With "auto", a run that cannot
    be planned sleeps as declared.
    Raises: PlanError where more must sleep than the host can keep.
    """
    needs = RunNeeds.of(cfg)
    phases, offload = needs.phases, needs.offload
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
    try:
        plan = resolve(cfg, world_size, gpu_bytes, host_bytes, ranks_per_host())
    except (ConfigError, PlanError) as error:
        return policy, f"roles sleep in turn: their memory cannot be planned ({error})"
    if plan.memory is None:
        return policy, "roles sleep in turn: the plan does not know the model"
    if plan.uncounted:
        names = ", ".join(plan.uncounted)
        return policy, f"roles sleep in turn: the plan does not know what {names} takes"
    if plan.sleep.host_problem:
        raise PlanError(plan.sleep.host_problem)
    if not any(plan.sleep.sleeping.values()):
        return awake, plan.sleep.sentence
    chosen = SleepPolicy(
        phases=effective_phases(plan.memory, plan.sleep.sleeping), host_bytes=offload.host_bytes
    )
    return chosen, plan.sleep.sentence


def ranks_per_host() -> int:
    """Return how many ranks NCCL takes for those of one host, in this process's world."""
    if not World.is_around():
        return GPUS_PER_HOST
    return max(1, World.from_env().local_size // ranks_per_gpu())


def gpu_bytes() -> int | None:
    """Return a rank's part of the memory of this process's first GPU; None where it sees none.

    It needs no torch, and makes no context.
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
    return size.value // ranks_per_gpu()
