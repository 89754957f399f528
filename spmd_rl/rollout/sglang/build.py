"""From an engine's config to an SGLang engine whose child generates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import ResidencyError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.private_folder import PrivateFolder
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import as_size
from spmd_rl.rollout.interpreter import Interpreter
from spmd_rl.rollout.memory import kv_budget
from spmd_rl.rollout.sglang.client import SchedulerClient
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import ChildSpec
from spmd_rl.rollout.sglang.options import (
    VERSIONS,
    SglangSite,
    check_options,
    server_args,
)
from spmd_rl.rollout.sglang.structs import field_lists
from spmd_rl.weights.layout import ITEM_BYTES

# SGLang's options where its own defaults serve a trainer beside it badly; a run may set them
DEFAULTS: dict[str, Any] = {
    "log_level": "warning",
    "sleep_on_idle": True,  # else an idle scheduler takes a whole core
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # they take most of the start
}
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
) -> SglangEngine:
    """Start a child for the model in `folder`, and return the engine once it is ready.

    It has no weights before the first push. `reserved_bytes` is the memory that the plan counts
    beside the engine's keys and values.

    Blocks: until the child is ready; engine.start_deadline_s ends it.
    Raises: ConfigError for an option or a version that does not serve; SpmdError with the child's
    own sentence if it fails.
    """
    started = start(cfg, folder, device, rank=rank, seed=seed, reserved_bytes=reserved_bytes)
    try:
        ready = started.child.wait_until_ready(started.spec, cfg.start_deadline_s)
    except BaseException:
        started.stop()
        raise
    return SglangEngine(
        started.child,
        started.client,
        cfg,
        ModelSpec.from_folder(folder),
        dtype=dtype_of(cfg.dtype, device),
        device=device,
        max_kv_tokens=ready.max_num_tokens,
        decode=decode,
        start_seconds=ready.seconds,
    )


@dataclass(frozen=True)
class StartedChild:
    """A child that imports its packages and waits for `spec`."""

    child: Child
    client: SchedulerClient
    spec: ChildSpec

    def stop(self) -> None:
        self.child.stop()
        self.client.close()


def start(
    cfg: SglangEngineConfig,
    folder: str,
    device: torch.device,
    *,
    rank: int = 0,
    seed: int = 0,
    reserved_bytes: int = 0,
) -> StartedChild:
    """Start a child, and do not wait for it. Raises: ConfigError, before anything starts."""
    site, interpreter = check_options(cfg), Interpreter.of(cfg.python)
    spec, dtype = ModelSpec.from_folder(folder), dtype_of(cfg.dtype, device)
    defaults = dict(DEFAULTS)
    if device.type == "cuda":
        weight_bytes = spec.num_parameters * ITEM_BYTES[dtype]
        defaults["mem_fraction_static"] = static_fraction(
            cfg, torch.cuda.mem_get_info(device), weight_bytes, reserved_bytes
        )
    sockets = PrivateFolder()
    child = Child(interpreter, site, rank)
    client = SchedulerClient(
        sockets.path, child.socket.fileno(), child.raise_failure, child.discard_failure
    )
    weakref.finalize(client, sockets.leave)
    child_spec = ChildSpec(
        versions=list(VERSIONS),
        server_args=server_args(cfg, _owned(cfg, folder, dtype, site, seed), defaults),
        port_args=_port_args(sockets.path, child),
        gpu_id=device.index or 0,
        fields=field_lists(),
    )
    return StartedChild(child, client, child_spec)


def _owned(
    cfg: SglangEngineConfig, folder: str, dtype: str, site: SglangSite, seed: int
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
    }


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


def _port_args(folder: Path, child: Child) -> dict[str, Any]:
    """Return the fields of SGLang's PortArgs."""
    return {
        **SchedulerClient.addresses(folder),
        "nccl_port": child.store.port,
        "tokenizer_worker_ipc_name": None,
        "decoupled_spec_ipc_config": None,
        "instance_id": folder.name,
    }
