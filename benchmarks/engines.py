"""Our engine and SGLang on one GPU, each in a process that starts once; the two take turns.

Both hold the same model folder in bf16, with room for the same number of KV tokens. Both run up to
512 sequences, draw at temperature 1 and ignore the end of sequence. SGLang runs in its fastest
mode, which is not deterministic: FlashAttention 3, CUDA graphs for prefill and for decoding at
every batch size, its default radix cache and overlapped schedule, and no log-probs. Ours always
records the log-prob of every token.

SGLang is installed in a folder of its own, because it needs another version of transformers:
`pip install --target SITE sglang==0.5.16`, then `--sglang SITE`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.peer import Laps, Peer
from benchmarks.shapes import VOCAB, is_hybrid
from spmd_rl.mesh.world import World

KV_TOKENS = 300 * 1024
MAX_BATCH = 512
PAGE_SIZE = 128
STEP_TOKENS = 8192  # SGLang's chunk of prefill on this GPU
SGLANG_MEMORY = 0.9  # of the GPU's memory, so that KV_TOKENS is the limit
PACKAGES = ("torch", "triton", "flash-attn-4")
# Qwen3.5 has random weights in both engines. Our kernel for heads of 256 has pages of 64 tokens.
# SGLang's own Qwen3.5 is a vision model, of which the text model runs alone.
HYBRID_BATCH = 256
HYBRID_SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {"page_size": 64, "num_pages": KV_TOKENS // 64, "max_batch": HYBRID_BATCH},
    "sglang": {
        "load_format": "dummy",
        "attention_backend": "triton",  # FlashAttention 3 is no part of its wheels
        "enable_multimodal": False,
        "max_running_requests": HYBRID_BATCH,
        "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # which would take a minute
        "cuda_graph_max_bs_decode": HYBRID_BATCH,
        "mamba_ssm_dtype": "float32",
        "max_mamba_cache_size": 6 * HYBRID_BATCH,
    },
}
SGLANG_SETTINGS = (
    "attention_backend",
    "max_total_num_tokens",
    "disable_overlap_schedule",
    "disable_prefill_cuda_graph",
    "quantization",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
)


@dataclass(frozen=True)
class Pair:
    ours: Peer
    sglang: Peer

    def __iter__(self) -> Iterator[tuple[str, Peer]]:
        yield from (("ours", self.ours), ("sglang", self.sglang))


def start(
    kind: str,
    folder: Path,
    sglang_site: str = "",
    settings: Mapping[str, Any] | None = None,
    tp: int = 1,
) -> Peer:
    """Start "ours" or "sglang" with a model folder, and `settings` over those of its class here.

    With `tp`, so many ranks of ours share the model, each on a GPU. SGLang's setting is "tp_size".
    """
    site = [str(Path.cwd()), sglang_site, f"{sglang_site}/nvidia_cutlass_dsl/dsl_packages"]
    env = {"PYTHONPATH": ":".join(site)} if sglang_site else {}
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={tp}"]
    module = ["-m", "benchmarks.engines", kind, str(folder), json.dumps(dict(settings or {}))]
    command = [sys.executable, *(ranks if tp > 1 else []), *module]
    return Peer(command, env, Path(tempfile.gettempdir()) / f"{kind}-{tp}-{folder.name}.log")


@contextmanager
def pair(name: str, sglang_site: str) -> Iterator[Pair]:
    """Yield both engines, ready, with random weights of a shape."""
    settings = HYBRID_SETTINGS if is_hybrid(name) else {}
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder, ExitStack() as stack:
        subprocess.run([sys.executable, "-m", "benchmarks.shapes", name, folder], check=True)

        def started(kind: str, site: str) -> Peer:
            return stack.enter_context(start(kind, Path(folder), site, settings.get(kind)))

        with ThreadPoolExecutor() as pool:
            ours, sglang = pool.map(started, ("ours", "sglang"), ("", sglang_site))
        given = sglang.ask(facts=True)["max_total_num_tokens"]
        if given != KV_TOKENS:
            raise RuntimeError(f"SGLang has room for {given} tokens, ours for {KV_TOKENS}")
        yield Pair(ours, sglang)


def versions(sglang: Peer) -> dict[str, str]:
    """Return SGLang's version, and the settings that it runs with."""
    facts = sglang.ask(facts=True)
    return {"sglang": facts["version"]} | {
        f"sglang {name}": str(facts[name]) for name in SGLANG_SETTINGS
    }


class Contender(Protocol):
    def generate(self, prompts: list[NDArray[np.int32]], new_tokens: list[int]) -> dict[str, Any]:
        """Generate `new_tokens[i]` tokens after each `prompts[i]`, and return facts for the reply.

        Equal prompts are the same object.
        """
        ...

    def facts(self) -> dict[str, Any]: ...


class Ours:
    """Our engine, with the folder's weights, or with random ones where it has none. In a torchrun
    world, all ranks share its model, and it is asked the same on each.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        import torch

        from benchmarks.coded_engine import engine_of
        from benchmarks.gpu_ranks import part_of_world
        from spmd_rl.model.parts.part import WHOLE
        from spmd_rl.model.read import read_spec
        from spmd_rl.model.weight_files import has_weights
        from spmd_rl.rollout.native.build import build
        from spmd_rl.rollout.native.config import NativeEngineConfig

        usual = {
            "page_size": PAGE_SIZE,
            "num_pages": KV_TOKENS // PAGE_SIZE,
            "max_batch": MAX_BATCH,
            "max_step_tokens": STEP_TOKENS,
            "dtype": "bfloat16",
        }
        cfg = NativeEngineConfig(**usual | settings)
        part = part_of_world() if World.is_around() else WHOLE
        spec = replace(read_spec(folder), row_shards=part.count)
        self.engine = (
            build(cfg, folder, torch.device("cuda"), str, part=part, row_shards=part.count)
            if has_weights(folder)
            else engine_of(spec, cfg, cfg.weights, part=part)
        )

    def generate(self, prompts: list[NDArray[np.int32]], new_tokens: list[int]) -> dict[str, Any]:
        from spmd_rl.rollout.engine import Request, SamplingConfig

        for index, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True)):
            self.engine.submit(
                Request(index, 0, prompt, SamplingConfig(max_tokens=count, ignore_eos=True))
            )
        before = self.engine.stats()
        steps, num_tokens, began = [], 0, time.perf_counter()
        while self.engine.has_work:
            progress, ended = self.engine.step(), time.perf_counter()
            num_tokens += len(progress.tokens)
            if len(progress.tokens) == len(prompts):
                steps.append(ended - began)
            began = ended
        after = self.engine.stats()
        rows, waited = (
            after[key] - before[key] for key in ("num_backlog_rows", "num_backlog_steps")
        )
        fill = rows / (waited * MAX_BATCH) if waited else None
        return {
            "num_tokens": num_tokens,
            "step_s": float(np.median(steps)) if steps else None,
            "fill": fill,
        }

    def facts(self) -> dict[str, Any]:
        return self.engine.stats()


class SgLang:
    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        import sglang

        usual = {
            "skip_tokenizer_init": True,
            "attention_backend": "fa3",
            "max_total_tokens": KV_TOKENS,
            "max_running_requests": MAX_BATCH,
            "mem_fraction_static": SGLANG_MEMORY,
            "cuda_graph_max_bs_decode": MAX_BATCH,
            "random_seed": 0,
            "log_level": "warning",
        }
        self.engine = sglang.Engine(model_path=folder, **usual | settings)

    def generate(self, prompts: list[NDArray[np.int32]], new_tokens: list[int]) -> dict[str, Any]:
        params = [
            {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
            for count in new_tokens
        ]
        outs = self.engine.generate(
            input_ids=[prompt.tolist() for prompt in prompts], sampling_params=params
        )
        return {"num_tokens": sum(len(out["output_ids"]) for out in outs)}

    def facts(self) -> dict[str, Any]:
        said = self.engine.get_server_info()
        return {"version": version("sglang")} | {name: said.get(name) for name in SGLANG_SETTINGS}


class LapsOfRanks:
    """Implements what `serve` needs of `Laps`: the first rank talks to the driver, and tells all
    ranks what it requests.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._laps = None if dist.get_rank() else Laps()

    def request(self) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        told: list[Any] = [self._laps.request() if self._laps else None]
        dist.broadcast_object_list(told, device=torch.device("cpu"))
        return told[0]

    def reply(self, **reply: Any) -> None:
        if self._laps:
            self._laps.reply(**reply)


def serve(kind: str, folder: str, settings: dict[str, Any]) -> None:
    made = Ours if kind == "ours" else SgLang
    contender: Contender = made(folder, settings)
    laps = LapsOfRanks() if World.is_around() else Laps()
    while True:
        request = laps.request()
        if "facts" in request:
            laps.reply(**contender.facts())
            continue
        rng = np.random.default_rng(request["seed"])
        once = [rng.integers(0, VOCAB, length, dtype=np.int32) for length in request["prompts"]]
        prompts = [prompt for prompt in once for _ in range(request["samples"])]
        start = time.perf_counter()
        reply = contender.generate(prompts, request["new_tokens"])
        reply["seconds"] = time.perf_counter() - start
        if reply["num_tokens"] != sum(request["new_tokens"]):
            raise RuntimeError(
                f"{kind} made {reply['num_tokens']} of {sum(request['new_tokens'])} tokens"
            )
        laps.reply(**reply)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("ours", "sglang"))
    parser.add_argument("folder")
    parser.add_argument("settings", type=json.loads)
    options = parser.parse_args()
    serve(options.kind, options.folder, options.settings)
