"""From an engine's config to an SGLang engine whose child generates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.private_folder import PrivateFolder
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.ledger import kv_budget
from spmd_rl.rollout.sglang.client import SchedulerClient
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import ChildSpec
from spmd_rl.rollout.sglang.options import VERSIONS, Interpreter, check_options, server_args
from spmd_rl.rollout.sglang.structs import field_lists

# SGLang's options where its own defaults serve a trainer beside it badly; a run may set them
DEFAULTS: dict[str, Any] = {
    "log_level": "warning",
    "sleep_on_idle": True,  # else an idle scheduler takes a whole core
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # they take most of the start
}
LEAST_FRACTION = 0.05


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
    site, interpreter = check_options(cfg), Interpreter.of(cfg.python)
    spec, dtype = ModelSpec.from_folder(folder), dtype_of(cfg.dtype, device)
    ours = {
        "model_path": folder,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": dtype,
        "random_seed": seed % (1 << 31),
        "max_running_requests": cfg.max_batch,
        "enable_memory_saver": bool(site.memory_saver),
    }
    if device.type == "cuda":
        defaults = DEFAULTS | {"mem_fraction_static": _static_fraction(cfg, device, reserved_bytes)}
    else:
        defaults = DEFAULTS
    private = PrivateFolder()
    child = Child(interpreter, site, rank)
    client = SchedulerClient(private.path, child.socket.fileno(), child.raise_failure)
    weakref.finalize(child, private.leave)
    try:
        ready = child.wait_until_ready(
            ChildSpec(
                list(VERSIONS),
                server_args(cfg, ours, defaults),
                _port_args(client, private, child),
                device.index or 0,
                field_lists(),
            ),
            cfg.start_deadline_s,
        )
    except BaseException:
        child.stop()
        client.close()
        raise
    engine = SglangEngine(
        child,
        client,
        cfg,
        spec,
        dtype=dtype,
        device=device,
        max_kv_tokens=ready.max_num_tokens,
        decode=decode,
    )
    engine.start_seconds = ready.seconds
    return engine
