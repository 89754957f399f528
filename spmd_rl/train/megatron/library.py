"""Megatron-core as a library: its import, its process-wide state, and what a CPU needs of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spmd_rl.errors import ConfigError
from spmd_rl.train.megatron.gloo_splits import adding, gathering
from spmd_rl.train.packages import MEGATRON, TRANSFORMER_ENGINE


@cache
def prepare_megatron() -> str:
    """Import Megatron-core, set the state that it keeps per process, and return its version.

    Raises: ConfigError if it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its optional packages
            import megatron.core
            from megatron.core import parallel_state
            from megatron.core.tensor_parallel.random import initialize_rng_tracker
    except ImportError as error:
        raise MEGATRON.missing(error) from error
    _silence_warnings()
    parallel_state._set_global_memory_buffer()  # sequence parallelism gathers into it
    initialize_rng_tracker(inference_rng_tracker=True)  # there is no dropout to draw for
    version: str = megatron.core.__version__
    return version


def require_transformer_engine(device: torch.device) -> str:
    """Return transformer-engine with its version. Raises: ConfigError where it cannot run."""
    setting = TRANSFORMER_ENGINE.setting
    if device.type != "cuda":
        raise ConfigError(f"{setting} needs a GPU: set it to 'local' on CPUs")
    try:
        import transformer_engine.pytorch  # noqa: F401  it loads the compiled part
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.core.utils import get_te_version
    except ImportError as error:
        raise TRANSFORMER_ENGINE.missing(error) from error
    if not HAVE_TE:
        raise ConfigError(f"{setting}: Megatron-core does not find transformer-engine")
    return f"transformer-engine {get_te_version()}"


def _silence_warnings() -> None:
    """Keep what users cannot act on out of their terminal: optional packages, and old names that
    Megatron-core calls in torch.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        message = rf".*torch\.distributed\.{name}. is deprecated"
        warnings.filterwarnings("ignore", message, FutureWarning)


@contextlib.contextmanager
def running_on(device: torch.device, tensor_group: dist.ProcessGroup) -> Iterator[None]:
    """Return a context in which Megatron-core runs on `device`; on the CPU it needs stand-ins.

    `tensor_group` are the ranks along tp. Attention reads them from a global where there are more
    of them than key-value heads.
    """
    with contextlib.ExitStack() as stack:
        on_cpu = [] if device.type == "cuda" else list(_stand_ins())
        for owner, name, stand_in in (*_everywhere(tensor_group), *on_cpu):
            stack.callback(setattr, owner, name, getattr(owner, name, None))
            setattr(owner, name, stand_in)
        if on_cpu:
            stack.enter_context(_CudaMeansCpu())
        yield


def _everywhere(group: dist.ProcessGroup) -> Iterator[tuple[Any, str, Any]]:
    """Yield the module, name and stand-in of what is wrong on any device: it reads the ranks along
    tp from a global, or a name that nothing defines.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import attention
    from megatron.core.transformer.moe import moe_utils

    def gather(x: Tensor, **_: Any) -> Tensor:
        return mappings.all_gather_last_dim_from_tensor_parallel_region(x, group=group)

    yield attention, "all_gather_last_dim_from_tensor_parallel_region", gather
    yield attention, "get_tensor_model_parallel_rank", group.rank
    # 0.16.1 forgets it where there is no transformer-engine
    yield moe_utils, "te_general_gemm", getattr(moe_utils, "te_general_gemm", None)


def _stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yield the module, name and stand-in of what Megatron-core calls on GPUs alone."""
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    gather, add = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    yield mappings, "_gather_along_first_dim", gathering(gather)
    yield mappings, "_reduce_scatter_along_first_dim", adding(add)
    yield torch.cuda, "current_device", lambda: torch.device("cpu")
    yield torch.cuda, "synchronize", _nothing
    yield torch.cuda, "Stream", _NoStream
    yield torch.cuda, "current_stream", lambda *_: _NoStream()
    yield torch.cuda, "stream", lambda _: contextlib.nullcontext()
    # recomputation saves the state of the GPU's generator
    yield random, "_get_cuda_rng_state", _nothing
    yield random, "_set_cuda_rng_state", _nothing
    # splits of an all-to-all, which become host arrays only where they are on a GPU
    yield token_dispatcher, "maybe_move_tensor_to_cpu", _as_host_array


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _as_host_array(one: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return one.numpy() if as_numpy and torch.is_tensor(one) else one


class _CudaMeansCpu(TorchFunctionMode):
    """Megatron-core writes device="cuda" out: here it means the CPU, and so does Tensor.cuda."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _NoStream:
    """The one stream that there is on CPUs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        return lambda *_, **__: self
