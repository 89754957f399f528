"""From an engine's config to an SGLang engine whose child generates."""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import LostRankError, ResidencyError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.private_folder import PrivateFolder
from spmd_rl.mesh.shared_gpus import refuse_shared_gpus
from spmd_rl.model.formats.folders import refuse_for_sglang
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import as_size
from spmd_rl.rollout.interpreter import Interpreter
from spmd_rl.rollout.kv_pages import kv_budget
from spmd_rl.rollout.sglang.client import SchedulerClient, ended
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.follower import SglangFollower
from spmd_rl.rollout.sglang.launch import Child, ChildWorld, name_of
from spmd_rl.rollout.sglang.messages import ChildSpec
from spmd_rl.rollout.sglang.options import (
    VERSIONS,
    SglangSite,
    check_options,
    check_routes,
    server_args,
)
from spmd_rl.rollout.sglang.structs import field_lists
from spmd_rl.rollout.sglang.tensor_parallel import (
    ALONE,
    RankChild,
    TensorParallel,
    check_sizes,
    shard_boxes,
)
from spmd_rl.weights.plan.layout import ITEM_BYTES

# SGLang's options where its own defaults serve a trainer beside it badly; a run may set them
DEFAULTS: dict[str, Any] = {
    "log_level": "warning",
    "sleep_on_idle": True,  # else an idle scheduler takes a whole core
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # they take most of the start
}
# experts as expert_views.py knows them
MIXTURE_DEFAULTS: dict[str, Any] = {"moe_runner_backend": "triton"}
STORE = "store"  # the file in which the schedulers of an engine meet
# of a GPU's free memory, for the keys and values of an engine that no plan has counted
FREE_SHARE = 0.4


def build(
    cfg: SglangEngineConfig,
    folder: str,
    device: torch.device,
    decode: Callable[[tuple[int, ...]], str] | None = None,
    *,
    rank: int = 0,
    seed: int = 0,
    reserved_bytes: int = 0,
    records_routes: bool = False,
    tp: TensorParallel = ALONE,
) -> SglangEngine | SglangFollower:
    """Start a child for the model in `folder`, and return the engine once it is ready.

    It has no weights before the first push. `reserved_bytes` is the memory that the plan counts
    beside the engine's keys and values. With `records_routes`, SGLang keeps the experts of each
    token in its cache in host memory. All ranks of the group `tp` call it together; the first one
    gets the engine that has the requests.

    Blocks: until the children of the group are ready; engine.start_deadline_s ends it.
    Raises: ConfigError for an option or a version that does not serve; SpmdError with the child's
    own sentence if it fails.
    """
    started = start(
        cfg,
        folder,
        device,
        rank=rank,
        seed=seed,
        reserved_bytes=reserved_bytes,
        records_routes=records_routes,
        tp=tp,
    )
    child, spec, dtype = started.child, read_spec(folder), dtype_of(cfg.dtype, device)
    try:
        ready = child.wait_until_ready(started.spec, cfg.start_deadline_s)
        others = tp.exchange_children(rank, child.pid)
    except BaseException:
        started.stop()
        raise
    boxes = shard_boxes(spec, tp.rank, tp.size)
    if started.client is None:
        return SglangFollower(
            child, cfg, spec, boxes, dtype=dtype, device=device, max_kv_tokens=ready.max_num_tokens
        )
    for other in others:
        watch(started.client, other)
    return SglangEngine(
        child,
        started.client,
        ready,
        cfg,
        spec,
        boxes,
        dtype=dtype,
        device=device,
        decode=decode,
        returns_routes=records_routes,
    )


@dataclass(frozen=True)
class StartedChild:
    """A child that imports its packages and waits for `spec`.

    `client` is None where the first rank of the group talks to the scheduler.
    """

    child: Child
    client: SchedulerClient | None
    spec: ChildSpec

    def stop(self) -> None:
        self.child.stop()
        if self.client is not None:
            self.client.close()


def start(
    cfg: SglangEngineConfig,
    folder: str,
    device: torch.device,
    *,
    rank: int = 0,
    seed: int = 0,
    reserved_bytes: int = 0,
    records_routes: bool = False,
    tp: TensorParallel = ALONE,
) -> StartedChild:
    """Start a child, and do not wait for it. Raises: ConfigError, before anything starts."""
    site, interpreter = check_options(cfg), Interpreter.of(cfg.python)
    spec, dtype = _spec(folder), dtype_of(cfg.dtype, device)
    if records_routes:
        RouteShape.required(spec)
        check_routes(site)
    check_sizes(spec, tp.size)
    fraction = None
    if device.type == "cuda":
        refuse_shared_gpus('engine.kind = "sglang"')
        weight_bytes = spec.num_parameters * ITEM_BYTES[dtype] // tp.size
        memory = torch.cuda.mem_get_info(device)
        fraction = static_fraction(cfg, memory, weight_bytes, reserved_bytes)
    sockets = PrivateFolder()
    meeting, fraction = tp.greet(sockets.path, fraction)
    child = Child(interpreter, site, rank, ChildWorld(tp.rank, tp.size, meeting / STORE))
    weakref.finalize(child, sockets.leave)
    client = None
    if tp.rank == 0:
        client = SchedulerClient(
            sockets.path, child.socket.fileno(), child.raise_failure, child.discard_failure
        )
    defaults = DEFAULTS if fraction is None else DEFAULTS | {"mem_fraction_static": fraction}
    owned = _owned(cfg, folder, dtype, site, seed, tp)
    if spec.num_experts:
        defaults = defaults | MIXTURE_DEFAULTS
        owned |= _owned_of_mixtures(records_routes, tp)
    child_spec = ChildSpec(
        versions=list(VERSIONS),
        server_args=server_args(cfg, owned, defaults),
        port_args=_port_args(sockets.path),
        gpu_id=device.index or 0,
        tp_rank=tp.rank,
        fields=field_lists(records_routes),
    )
    return StartedChild(child, client, child_spec)


def watch(client: SchedulerClient, other: RankChild) -> None:
    """Have the client notice at once when the child of another rank ends.

    Where the kernel cannot tell (Linux before 5.3, gVisor), the end of our own child follows.
    """
    name = name_of(other.rank, other.pid)
    try:
        descriptor = os.pidfd_open(other.pid)
    except ProcessLookupError as error:
        raise LostRankError(ended(name)) from error
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
    else:
        client.watch(descriptor, name)


def _spec(folder: str) -> ModelSpec:
    """Return the model of a folder. Raises: ConfigError for one that SGLang cannot take."""
    refuse_for_sglang(folder)
    return read_spec(folder)


def _owned(
    cfg: SglangEngineConfig,
    folder: str,
    dtype: str,
    site: SglangSite,
    seed: int,
    tp: TensorParallel,
) -> dict[str, Any]:
    """Return the options that a run may not set (options.py says why)."""
    return {
        "model_path": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "random_seed": seed % (1 << 31),
        "max_running_requests": cfg.max_batch,
        "enable_memory_saver": bool(site.memory_saver),
        "tp_size": tp.size,
    }


def _owned_of_mixtures(records_routes: bool, tp: TensorParallel) -> dict[str, Any]:
    return {"enable_return_routed_experts": records_routes, "ep_size": tp.size}


def static_fraction(
    cfg: SglangEngineConfig, memory: tuple[int, int], weight_bytes: int, reserved_bytes: int
) -> float:
    """Return SGLang's mem_fraction_static: the share of what is free now for weights and K/V.

    `memory` is what is free and what the GPU has. As for the native engine, keys and values get
    what the plan leaves of `memory_fraction`, or FREE_SHARE of what is free without a plan.
    """
    free_bytes, capacity_bytes = memory
    in_use_bytes = capacity_bytes - free_bytes
    beside = max(reserved_bytes, in_use_bytes + weight_bytes)
    kv_bytes = kv_budget(capacity_bytes, cfg.memory_fraction, beside)
    if not reserved_bytes:
        kv_bytes = min(kv_bytes, int(free_bytes * FREE_SHARE))
    fraction = (kv_bytes + weight_bytes) / free_bytes
    if not 0 < fraction < 1:
        raise ResidencyError(
            f"no room for SGLang's weights and its keys and values: {as_size(free_bytes)} are "
            f"free, and they would take {as_size(max(kv_bytes, 0) + weight_bytes)}"
        )
    return round(fraction, 4)


def _port_args(folder: Path) -> dict[str, Any]:
    """Return the fields of SGLang's PortArgs. Its processes meet in a file, so no port is used."""
    return {
        **SchedulerClient.addresses(folder),
        "nccl_port": 0,
        "tokenizer_worker_ipc_name": None,
        "decoupled_spec_ipc_config": None,
        "instance_id": folder.name,
    }
