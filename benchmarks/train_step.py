"""Training step with shapes of Qwen3 and 3.5 on one GPU: our contract path and its variants.

The variants of the same step take turns, and the first one changes with each repetition:

    contract   as shipped: the bits of a row do not depend on other rows
    free       cuBLAS picks the matrix products, with split-K allowed; the rest as shipped
    repeats    as shipped, with a backward pass that also repeats its bits (trainer.deterministic)
    chunked    layers with a state run fla-core's forward pass in chunks, with its casts to bf16

A step is learner.train_step on 64 sequences of 128 + 896 tokens in packs of 16,384, with the
optimizer. Values are medians of the host's clock around it, with the GPU drained before and after.

MFU counts 6 operations for every weight and token that meet, the causal half of attention, and no
recomputation (spmd_rl/train/cost/flops.py). It is given against 989 TFLOP/s, and against the 788
that a large product reaches. Forward, backward and optimizer are times between CUDA events in the
contract path. Peak memory is of that path too. Products are swapped in the forward pass only; in
the backward pass all variants use torch's.

    python -m benchmarks.train_step 0.6B 4B [--save]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import MEASURED_FLOPS_PER_S, title
from benchmarks.table import Row
from benchmarks.training import batch, config, learner, scored
from spmd_rl.algo.losses import grpo_loss
from spmd_rl.kernels.delta.rule import DeltaHeads
from spmd_rl.kernels.delta.states import Places, StateMemory
from spmd_rl.kernels.linear import dispatch
from spmd_rl.train.cost.flops import PEAK_FLOPS_PER_S, train_flops
from spmd_rl.train.fsdp2.determinism import WORKSPACE, WORKSPACES, deterministic
from spmd_rl.train.learner import Learner
from spmd_rl.train.on_policy import COMPARED, MISMATCHED
from spmd_rl.types.batch import Batch

PACKAGES = ("torch", "triton", "flash-attn-4")
STEP_TOKENS = 65536
SPEED_BAR, MFU_BAR = 1 / 0.97, 0.45
WARMUPS = 2
PARTS = {"forward": "forward", "backward": "backward", "step": "optimizer"}
os.environ.setdefault(WORKSPACE, WORKSPACES[0])  # torch's own default on Hopper


def free_product(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if bias is not None:
        return torch.addmm(bias, x, weight.t())
    return torch.mm(x, weight.t(), **({"out_dtype": out_dtype} if out_dtype != x.dtype else {}))


def chunked_recurrence(
    mixed: Tensor, gates: Tensor, places: Places, heads: DeltaHeads, memory: StateMemory
) -> Tensor:
    """What `recurrence` returns, to within rounding, for sequences without a past."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    keys, values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    parts = [part.bfloat16() for part in mixed[None].split([keys, keys, values], dim=-1)]
    query, key = (part.unflatten(-1, (heads.keys, heads.key_dim)) for part in parts[:2])
    value = parts[2].unflatten(-1, (heads.values, heads.value_dim))
    ends = torch.cat([places.first, places.first[-1:] + places.lengths[-1:]]).long()
    decay, beta = gates[None, ..., 0].log(), gates[None, ..., 1]
    out, _ = chunk_gated_delta_rule(
        query, key, value, decay, beta.bfloat16(), scale=1.0, cu_seqlens=ends
    )
    return out[0].float()


def chunked() -> AbstractContextManager[object]:
    from spmd_rl.kernels.delta import recurrence_triton

    return patch.object(recurrence_triton, "recurrence", chunked_recurrence)


VARIANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "contract": nullcontext,
    "free": lambda: patch.object(dispatch, "matmul", free_product),
    "repeats": deterministic,
    "chunked": chunked,
}
PATHS = ["contract", "free", "repeats"]
BARS = {"chunked": 1.08}


class Timed:
    """A backend that times forward, backward and optimizer step with CUDA events."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        self.spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __getattr__(self, name: str) -> object:
        found = getattr(self.inner, name)
        return self._span(name, found) if name in PARTS else found

    def _span(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **named: object) -> object:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = call(*args, **named)
            end.record()
            self.spans.append((name, begin, end))
            return result

        return timed

    def milliseconds(self) -> dict[str, float]:
        torch.cuda.synchronize()
        total: dict[str, float] = {}
        for name, begin, end in self.spans:
            total[name] = total.get(name, 0.0) + begin.elapsed_time(end)
        return total


def step_seconds(one: Learner, given: Batch) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    one.train_step(given, grpo_loss)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(name: str, options: argparse.Namespace) -> Iterator[Row]:
    cfg = config(name)
    one = learner(name, cfg)
    spec = one.backend.scorer.model.spec
    given = scored(one, batch(STEP_TOKENS, spec.vocab_size))
    metrics = one.train_step(given, grpo_loss)
    what = f"{title(name)}, packs of {cfg.max_tokens}, recompute {cfg.backend.recompute}"
    yield measured(
        f"{what}: mismatched of {metrics[COMPARED]:.0f} tokens",
        metrics[MISMATCHED],
        "tokens",
        at_most=0,
    )
    torch.cuda.reset_peak_memory_stats()
    one.train_step(given, grpo_loss)
    yield measured(f"{what}: peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    times: dict[str, list[float]] = {path: [] for path in options.paths}
    for repeat in range(WARMUPS + options.repeats):
        first = repeat % len(options.paths)
        for path in options.paths[first:] + options.paths[:first]:
            with VARIANTS[path]():
                seconds = step_seconds(one, given)
            if repeat >= WARMUPS:
                times[path].append(seconds)
            print(f"{what} {path}: {seconds:.3f} s", flush=True)
    ours = statistics.median(times["contract"])
    for path in options.paths[1:]:
        peer = statistics.median(times[path])
        bar = BARS.get(path, SPEED_BAR)
        yield compared(f"{what}: step", ours, "s", peer=path, peer_value=peer, at_most=bar)
    flops = train_flops(spec, given.lengths, int(given.mask.sum())) / ours
    mfu_bar = MFU_BAR if name == "4B" else None
    yield measured(
        f"{what}: MFU of 989 TFLOP/s", flops / PEAK_FLOPS_PER_S["H200"], "", at_least=mfu_bar
    )
    yield measured(f"{what}: MFU of 788 TFLOP/s", flops / MEASURED_FLOPS_PER_S, "")
    one.backend = timed = Timed(one.backend)
    one.train_step(given, grpo_loss)
    for part, spent in timed.milliseconds().items():
        yield measured(f"{what}: {PARTS[part]}", spent, "ms")
    one.backend = timed.inner


def main(script: str, doc: str | None, models: list[str], paths: list[str]) -> int:
    """Measure the models of the command line, or these, and record them; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=models)
    parser.add_argument("--paths", nargs="+", choices=VARIANTS, default=paths)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.models:
        rows += measure(name, options)
        torch.cuda.empty_cache()
    return finish(script, PACKAGES, rows, save=options.save, machine=gpu_machine(), **gpu())


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, ["0.6B", "4B"], PATHS))
