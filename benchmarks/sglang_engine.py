"""SGLang as the engine of a rank on one GPU, at the shape of a 0.6B model.

python -m benchmarks.sglang_engine --python /tmp/sgl --smoke
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import random_weights, write_config
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.sglang.build import build
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.engine import SglangEngine
from spmd_rl.types.samples import Sample
from spmd_rl.weights.digest import digest
from spmd_rl.weights.layout import Box
from spmd_rl.weights.local_tensors import LocalTensors

TOKENIZER_OF = Path("examples/arithmetic/model-20m")
LENGTHS = (5, 17, 64, 130)


def push(engine: SglangEngine, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """Push whole tensors through the engine's sink, and return the seconds of each part."""
    sink, began = engine.sink(), time.perf_counter()
    sink.open()
    opened = time.perf_counter()
    for name, tensor in weights.items():
        box = Box((0,) * tensor.ndim, tuple(tensor.shape))
        slot = sink.slot(name, box)
        if slot is None:
            sink.flush()
            slot = sink.slot(name, box)
        if slot is None:
            sink.write(name, box, tensor)
        else:
            slot.copy_(tensor)
    sink.flush()
    sent = time.perf_counter()
    held = {name: value for (name, _), value in sink.digest().items()}
    digested = time.perf_counter()
    own = digest(LocalTensors.whole(dict(weights)))
    if differing := [name for name, value in own.items() if held.get(name) != value]:
        raise AssertionError(f"the child holds other bits of {differing[:3]}")
    began_commit = time.perf_counter()
    sink.commit(version)
    ended = time.perf_counter()
    return {
        "open_s": opened - began,
        "send_s": sent - opened,
        "digest_s": digested - sent,
        "commit_s": ended - began_commit,
    }


def prompts(count: int, vocab_size: int, seed: int = 1) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    lengths = random.choice(LENGTHS, count)
    return [random.integers(0, vocab_size, length).astype(np.int32) for length in lengths]


def generate(
    engine: SglangEngine, of: list[np.ndarray[Any, Any]], sampling: SamplingConfig
) -> list[Sample]:
    for uid, prompt in enumerate(of):
        engine.submit(Request(uid, 0, prompt, sampling))
    done: list[Sample] = []
    while engine.has_work:
        done += engine.step().finished
    return sorted(done, key=lambda sample: sample.prompt_uid)


class Steps:
    """Prints a line for each step, with its time and what it returns, and goes on after errors."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.num_failed = 0

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        try:
            result = work()
        except Exception:  # noqa: BLE001 - all that fails is shown, and the next steps are tried
            self.num_failed += 1
            result = "FAILED\n" + traceback.format_exc()
        now = time.perf_counter()
        shown = "" if isinstance(result, (SglangEngine, list)) else result
        print(f"{now - self.began:7.1f}s {name}: {now - began:.3f} s {shown}", flush=True)
        return result


def smoke(cfg: SglangEngineConfig, device: torch.device) -> int:
    step = Steps()
    folder = Path(tempfile.mkdtemp()) / "model"
    spec = write_config("0.6B", folder, TOKENIZER_OF)
    engine = step("start", lambda: build(cfg, str(folder), device))
    if not isinstance(engine, SglangEngine):
        return 1
    print(f"         parts of the start {engine.start_seconds}", flush=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in random_weights(spec, seed=3)}
    greedy = SamplingConfig(temperature=0.0, max_tokens=32, ignore_eos=True)
    inputs = prompts(16, spec.vocab_size)
    step("first push", lambda: push(engine, weights, 1))
    step("second push", lambda: push(engine, weights, 2))
    first = step("generate 16 x 32", lambda: generate(engine, inputs, greedy))
    step("lengths", lambda: sorted({(len(one.tokens), one.finish) for one in first})[:4].__str__())
    step("generate again", lambda: generate(engine, inputs, greedy))
    for _ in range(2):
        before = torch.cuda.mem_get_info(device)[0]
        step("sleep", engine.sleep)
        freed = (torch.cuda.mem_get_info(device)[0] - before) / 2**30
        step(f"wake ({freed:.1f} GiB were given back)", engine.wake)
    step("push after the wake", lambda: push(engine, weights, 3))

    def same() -> str:
        again = generate(engine, inputs, greedy)
        pairs = zip(first, again, strict=True)
        return f"{sum(np.array_equal(a.tokens, b.tokens) for a, b in pairs)} of {len(first)} equal"

    step("greedy after sleep, wake, push", same)

    def interrupted() -> str:
        long = SamplingConfig(temperature=1.0, max_tokens=200, ignore_eos=True)
        for uid, prompt in enumerate(inputs):
            engine.submit(Request(uid, 0, prompt, long))
        engine.step()
        push(engine, weights, 4)
        done: list[Sample] = []
        while engine.has_work:
            done += engine.step().finished
        versions = sorted({tuple(np.unique(one.versions).tolist()) for one in done})
        return f"{len(done)} samples, versions {versions}"

    step("push in the middle", interrupted)

    def aborted() -> str:
        for uid, prompt in enumerate(inputs):
            engine.submit(Request(uid, 0, prompt, greedy))
        parts = [sample for uid in range(8) for sample in engine.abort(uid)]
        done: list[Sample] = []
        while engine.has_work:
            done += engine.step().finished
        return f"{len(parts)} aborted, {len(done)} finished"

    step("abort half", aborted)

    def killed() -> str:
        import os
        import signal

        engine.submit(Request(0, 0, inputs[0], greedy))
        os.kill(engine.child.pid, signal.SIGKILL)
        try:
            while engine.has_work:
                engine.step()
        except Exception as error:  # noqa: BLE001 - it is the result
            return f"{type(error).__name__}: {error}"
        return "nothing was noticed"

    step("killed child", killed)
    step("close", engine.close)
    return int(step.num_failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default="", help="as engine.python")
    parser.add_argument("--attention", default="triton", help="SGLang's attention_backend")
    parser.add_argument("--smoke", action="store_true", help="try each part once, and say the time")
    words = parser.parse_args()
    options = {"attention_backend": words.attention, "cuda_graph_max_bs_decode": 64}
    cfg = SglangEngineConfig(python=words.python, options=options, max_batch=64)
    if words.smoke:
        return smoke(cfg, torch.device("cuda", 0))
    raise SystemExit("say --smoke")


if __name__ == "__main__":
    sys.exit(main())
