"""Decode step of our engine with weights in few bits, beside SGLang with its own FP8, on one GPU.

SGLang has FP8 weights and an FP8 cache, and multiplies in FP8: its log-probs are not a trainer's.
engines.py says how else both run, and engine_vs_sglang.py how a step is timed. Weights are random,
and SGLang's are its dummies. The formats of ours come one after the other, beside one SGLang.

    python -m benchmarks.coded_vs_sglang --sglang SITE [--attention triton] [--save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.engine_vs_sglang import step_ms
from benchmarks.engines import PACKAGES, PAGE_SIZE, Pair, start, versions
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.sglang_cli import ROOMS
from benchmarks.shapes import write_config
from benchmarks.table import Row

CASES = ((1, 128), (64, 128), (256, 128))  # batch, prompt
LENGTHS, REPEATS, BAR = (64, 160), 3, 0.85
MOST, KV_TOKENS = 256, 128 * 1024
CACHE = {"cache": "e4m3"}
FORMATS = {
    "e4m3": {"weights": "e4m3"},
    "e4m3 with its cache": {"weights": "e4m3", **CACHE},
    "int4": {"weights": "int4"},
    "int4 with a cache in e4m3": {"weights": "int4", **CACHE},
}
OURS = {"num_pages": KV_TOKENS // PAGE_SIZE, "max_batch": 2 * MOST}  # more rows than sequences
SGLANG: dict[str, Any] = {
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e4m3",
    "load_format": "dummy",
    "max_total_tokens": KV_TOKENS,
    "max_running_requests": MOST,
    "cuda_graph_max_bs_decode": MOST,
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},  # prefill is not timed
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="8B")
    parser.add_argument("--sglang", required=True, metavar="SITE")
    parser.add_argument("--attention", default="fa3", help="SGLang's attention_backend")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shape-") as name:
        folder = Path(name)
        write_config(options.model, folder)
        theirs = SGLANG | {"attention_backend": options.attention}
        with start("sglang", folder, options.sglang, theirs) as sglang:
            found = versions(sglang)
            print(found, flush=True)
            for kind in options.formats:
                with start("ours", folder, settings=OURS | FORMATS[kind]) as ours:
                    rows += rows_of(f"Qwen3-{options.model}, {kind}", Pair(ours, sglang))
    facts = gpu() | found
    return finish(
        __file__,
        PACKAGES,
        rows,
        save=options.save,
        rooms=ROOMS,
        machine=gpu_machine(),
        **facts,
    )


def rows_of(what: str, engines: Pair) -> list[Row]:
    rows: list[Row] = []
    for batch, prompt in CASES:
        ours, theirs, clock = step_ms(engines, batch, prompt, REPEATS, LENGTHS)
        case = f"{what}, batch {batch}, prompt {prompt}"
        print(f"{case}: ours {ours:.2f}, SGLang in FP8 {theirs:.2f} ms", flush=True)
        peer = "SGLang in FP8"
        rows += [
            compared(f"{case}: step", ours, "ms", peer=peer, peer_value=theirs, at_most=BAR),
            measured(f"{case}: our own clock around step", clock, "ms"),
        ]
    return rows


if __name__ == "__main__":
    sys.exit(main())
