"""Options of SGLang in a run's config: they go by SGLang's own names, and are checked here.

SGLang is asked in a process of the child's interpreter, before any child starts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from spmd_rl.config.likely import likely_name
from spmd_rl.errors import ConfigError
from spmd_rl.rollout.interpreter import Interpreter
from spmd_rl.rollout.sglang.config import SglangEngineConfig

RUN_VERSION = "0.5.16"
VERSIONS = (RUN_VERSION, "0.5.17")  # the latter was compared by its lists of fields
ROUTES_VERSION = "0.5.17"  # whose requests we know how to ask for routes
FACTS_PROGRAM = Path(__file__).with_name("site_facts.py")
ASK_DEADLINE_S = 120.0

_PLACEMENT = "the world places one scheduler on each rank's own GPU"
_ADDRESS = "the rank chooses the addresses of its child"
_WEIGHTS = "the weights come by push"
_TOKENS = "prompts and answers are token ids, and the rank decodes them"
# options that a run may not set, and the clause that says why
OWNED = {
    "model_path": "the recipe's key `model` names the folder",
    "tokenizer_path": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "tokenizer_worker_num": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "load_format": _WEIGHTS,
    "weight_loader_disable_mmap": _WEIGHTS,
    "checkpoint_engine_wait_weights_before_ready": _WEIGHTS,
    "device": "it follows from the world",
    "dtype": "set engine.dtype",
    "random_seed": "set run.seed",
    "max_running_requests": "set engine.max_batch",
    "enable_memory_saver": "sleep and wake need it",
    "enable_weights_cpu_backup": _WEIGHTS,
    "stream_interval": "the rank asks for it request by request",
    "tp_size": "set split.infer.tp",
    "enable_return_routed_experts": "set sampling.replay_routes",
    "pp_size": _PLACEMENT,
    "dp_size": _PLACEMENT,
    "ep_size": "experts are placed on the ranks of split.infer.tp",
    "enable_dp_attention": _PLACEMENT,
    "nnodes": _PLACEMENT,
    "node_rank": _PLACEMENT,
    "base_gpu_id": _PLACEMENT,
    "gpu_id_step": _PLACEMENT,
    "dist_init_addr": _ADDRESS,
    "host": _ADDRESS,
    "port": _ADDRESS,
    "nccl_port": _ADDRESS,
}


@dataclass(frozen=True)
class SglangSite:
    """SGLang as the child's interpreter finds it.

    `memory_saver` is the library that is preloaded so that the child can sleep; "" where there is
    no CUDA.
    """

    version: str
    options: tuple[str, ...]
    memory_saver: str


def check_options(cfg: SglangEngineConfig) -> SglangSite:
    """Return the SGLang that `cfg` names, once every option is known to it and may be set.

    Raises: ConfigError, which names the option or the version.
    """
    site = ask_site(cfg.python)
    for name in cfg.options:
        if name in OWNED:
            raise ConfigError(f"engine.options.{name} cannot be set: {OWNED[name]}")
        if name not in site.options:
            nearest = _nearest(name, site.options)
            raise ConfigError(
                f"engine.options.{name} is no option of SGLang {site.version}{nearest}"
            )
    return site


def check_routes(site: SglangSite) -> None:
    """Raise a ConfigError for an SGLang that is not asked for routes."""
    if site.version != ROUTES_VERSION:
        raise ConfigError(
            f"sampling.replay_routes needs SGLang {ROUTES_VERSION}, and engine.python has "
            f"{site.version}: install sglang=={ROUTES_VERSION} there, or set it to false"
        )


@lru_cache
def ask_site(python: str) -> SglangSite:
    """Ask the interpreter of `engine.python` for its SGLang.

    Raises: ConfigError when there is none, or one of another version than this adapter knows.
    """
    interpreter = Interpreter.of(python)
    where = f"engine.python = {python!r}"
    try:
        facts = json.loads(
            subprocess.run(
                [interpreter.command, str(FACTS_PROGRAM)],
                env=os.environ | {"PYTHONPATH": interpreter.search_path, "PYTHONSAFEPATH": "1"},
                capture_output=True,
                text=True,
                timeout=ASK_DEADLINE_S,
                check=True,
            ).stdout
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
        raise ConfigError(f"{where} does not run Python programs: {reason}") from error
    _check_version(facts["version"], where)
    return SglangSite(facts["version"], tuple(facts["options"]), facts["memory_saver"])


def server_args(
    cfg: SglangEngineConfig, ours: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of SGLang's ServerArgs: `defaults`, then the user's options, then ours."""
    return {**defaults, **cfg.options, **ours}


def _check_version(version: str, where: str) -> None:
    if not version:
        raise ConfigError(
            f"{where} has no SGLang: install sglang=={RUN_VERSION} there (docs/sglang.md)"
        )
    if version not in VERSIONS:
        raise ConfigError(
            f"{where} has SGLang {version}, whose messages this version of spmd_rl does not know: "
            f"install sglang=={RUN_VERSION} there (docs/sglang.md)"
        )


def _nearest(name: str, options: tuple[str, ...]) -> str:
    """Return the end of a sentence that names the option nearest to `name`; "" if none is near."""
    likely = likely_name(name, options)
    return f"; the nearest is {likely!r}" if likely else ""
