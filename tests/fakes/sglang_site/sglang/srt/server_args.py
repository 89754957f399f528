"""Options of the stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class ServerArgs:
    model_path: str
    skip_tokenizer_init: bool
    dtype: str
    disable_cuda_graph: bool
    disable_radix_cache: bool
    disable_overlap_schedule: bool
    enable_deterministic_inference: bool
    log_level: str
    max_total_tokens: int
    max_running_requests: int
    chunked_prefill_size: int
    random_seed: int
    attention_backend: str = "triton"
    broken_layer: int = -1  # of the stand-in: the MLP of this layer is another one


class PortArgs:
    @staticmethod
    def init_new(server_args: Any) -> PortArgs:
        return PortArgs()
