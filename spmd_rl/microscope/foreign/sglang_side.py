"""SGLang as a side of a comparison: it runs in a child process, which writes a dump."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import ConfigError, SpmdError
from spmd_rl.microscope.foreign.inputs_file import write_inputs
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.rollout.foreign_program import run_program

PROGRAM = Path(__file__).with_name("sglang_dump.py")
DETERMINISTIC = "enable_deterministic_inference"
DEADLINE_S = 900.0  # for SGLang to start, to compile and to compute all sequences
SPARE_TOKENS = 4096  # of its cache, beyond the longest sequence
# What the replay decides, so that a user's options may not.
OWNED = (
    "model_path",
    "dtype",
    "skip_tokenizer_init",
    "disable_cuda_graph",
    "tp_size",
    DETERMINISTIC,
)


@dataclass(frozen=True)
class SglangSide:
    """Which SGLang runs, and how. `options` are SGLang's own, by the names of its ServerArgs."""

    python: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in OWNED:
            if name in self.options:
                raise ConfigError(f"SGLang's option {name} cannot be set: the replay chooses it")


def write_sglang_dump(
    side: SglangSide, case: ReplayCase, model: Path, dtype: torch.dtype, folder: Path
) -> Path:
    """Have SGLang compute the sequences of `case`, and return the dump that it wrote to `folder`.

    Blocks: until SGLang is done; DEADLINE_S ends it.
    Raises: SpmdError with SGLang's own last line if it fails.
    """
    folder.mkdir(mode=0o700, parents=True)
    inputs, dump = folder / "inputs.json", folder / "dump.safetensors"
    write_inputs(case, model, inputs)
    arguments = _server_args(side, case, model, dtype)
    run_program(
        PROGRAM,
        [str(inputs), json.dumps(arguments), str(dump)],
        python=side.python,
        folder=folder,
        name="SGLang's forward pass",
        deadline_s=DEADLINE_S,
    )
    if not dump.is_file():
        raise SpmdError("SGLang's forward pass ended without a dump")
    return dump


def _server_args(
    side: SglangSide, case: ReplayCase, model: Path, dtype: torch.dtype
) -> dict[str, Any]:
    """Return SGLang's ServerArgs. Without graphs every op passes its hooks."""
    defaults: dict[str, Any] = {
        "log_level": "warning",
        "max_total_tokens": int(case.lengths.max()) + SPARE_TOKENS,
        "max_running_requests": 16,
        "chunked_prefill_size": -1,
        "random_seed": 0,
    }
    ours = {
        "model_path": str(model.absolute()),
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        DETERMINISTIC: side.deterministic,
    }
    return defaults | side.options | ours
