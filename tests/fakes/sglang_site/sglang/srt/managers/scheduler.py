"""Scheduler of the stand-in: it holds a model runner."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from sglang.srt.model import load


class _Pool:
    def clear(self) -> None:
        pass


def configure_scheduler_process(server_args: Any, *ranks: Any) -> None:
    method = os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"]
    assert method.startswith("file://"), "a store that listens serves every user of the host"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


class Scheduler:
    def __init__(self, server_args: Any, port_args: Any, *ranks: Any) -> None:
        runner = SimpleNamespace(
            model=load(server_args),
            server_args=server_args,
            req_to_token_pool=_Pool(),
            token_to_kv_pool_allocator=_Pool(),
            prefill_attention_backend_str=server_args.attention_backend,
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)
