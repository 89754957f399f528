"""LoRA beside full fine-tuning on one GPU: the forward and backward pass, and a step of GRPO.

- passes: the forward and backward pass of 8 sequences of 1,024 tokens with shapes of Qwen3,
  adapters of rank 16 beside all projections, against all weights. Both recompute the same, one
  after the other. Values are medians of times between CUDA events. Full fine-tuning has its moments
  in host memory, so that 4B fits 80 GB, and 8B 141 GB; no optimizer step is within the time.
- step: GRPO of the shape of Qwen3-8B, 8 prompts with 8 samples of 256 tokens.

    python -m benchmarks.lora_step [--quick] [--save] [passes step] [--shapes 0.6B 4B 8B]
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.beside_commit import GPU_TOKENIZER, NOW, ROOT, started
from benchmarks.lora_recipe import PUSH_BYTES
from benchmarks.record import compared, finish, gpu, gpu_machine, measured
from benchmarks.shapes import QWEN3, write_folder
from benchmarks.table import Row
from benchmarks.training import batch, learner
from spmd_rl.algo.losses import Needs
from spmd_rl.model.hf import random_adapters
from spmd_rl.model.lora import LoraConfig
from spmd_rl.model.read import read_spec
from spmd_rl.train.backend import Outputs
from spmd_rl.train.config import Fsdp2Config, TrainerConfig
from spmd_rl.train.learner import Learner
from spmd_rl.train.microbatch import MicroBatch

PARTS = ("passes", "step")
RANK = 16
TOKENS = 8192
BAR = 0.75
WARM_UP, REPEATS = 2, 9
STEP_WARM_UP, STEPS = 1, 3
STEP = ("--prompts_per_step=8", "--sampling.num_samples=8", "--sampling.max_tokens=256")


def configs(name: str) -> tuple[TrainerConfig, TrainerConfig]:
    """Return the settings of full fine-tuning and of LoRA, which differ in nothing else."""
    recompute = "none" if name == "0.6B" else "cheap"
    backend = Fsdp2Config(recompute=recompute, offload="moments")
    full = TrainerConfig(dtype="bfloat16", max_tokens=TOKENS, backend=backend)
    alone = replace(backend, offload="none")
    return full, replace(full, backend=alone, lora=LoraConfig(rank=RANK))


def pass_milliseconds(one: Learner, micros: list[MicroBatch]) -> float:
    """Return the time of a forward and backward pass over the micro-batches."""

    def loss_of(number: int, outputs: Outputs) -> Tensor:
        assert outputs.logprobs is not None
        return (outputs.logprobs * micros[number].advantages).sum() / TOKENS

    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began.record()
    one.backend.forward_backward(micros, loss_of, Needs())
    ended.record()
    torch.cuda.synchronize()
    one.backend.discard()
    return began.elapsed_time(ended)


def measure(name: str, cfg: TrainerConfig, repeats: int) -> tuple[float, float]:
    """Return the median milliseconds of a pass, and the GiB that it takes beside the weights."""
    one = learner(name, cfg)
    spec = one.backend.scorer.model.spec
    one.backend.fill(random_adapters(cfg.lora.shapes(spec), seed=0))
    micros = one.runner.micro_batches(batch(TOKENS, spec.vocab_size))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = [pass_milliseconds(one, micros) for _ in range(WARM_UP + repeats)]
    return median(times[WARM_UP:]), (torch.cuda.max_memory_allocated() - before) / 2**30


def passes(name: str, repeats: int) -> Iterator[Row]:
    """Yield the rows of one shape. Both trainers are on the GPU one after the other."""
    found = []
    for cfg in configs(name):
        found.append(measure(name, cfg, repeats))
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()
    (full_ms, full_gib), (lora_ms, lora_gib) = found
    what, peer = f"Qwen3-{name}, rank {RANK}, {TOKENS} tokens", "full fine-tuning"
    yield compared(
        f"{what}: forward and backward pass",
        lora_ms,
        "ms",
        peer=peer,
        peer_value=full_ms,
        at_most=BAR,
    )
    yield compared(f"{what}: memory of the pass", lora_gib, "GiB", peer=peer, peer_value=full_gib)


def grpo_step(folder: Path, quick: bool) -> Iterator[Row]:
    """Yield the rows of a step of GRPO, trainer and engine on one GPU."""
    model = folder / "model"
    write_folder("8B", model, GPU_TOKENIZER)
    torch.cuda.empty_cache()
    words = [
        "benchmarks.lora_recipe",
        f"--model={model}",
        "--data=examples/arithmetic/train.jsonl",
        "--reward=benchmarks.offload_recipe:reward",
        "--sampling.ignore_eos=true",
        "--steps=1000",
        f"--trainer.lora.rank={RANK}",
        "--trainer.lr=1e-4",
        "--trainer.max_tokens=4096",
        "--trainer.backend.recompute=cheap",
        *STEP,
    ]
    laps = []
    with started({NOW: ROOT}, words, 1) as sides:
        for number in range(STEP_WARM_UP + (1 if quick else STEPS)):
            reply = sides[NOW].ask(laps=1)
            if number >= STEP_WARM_UP:
                laps.append(reply)
    what = f"8B, rank {RANK}, 8 x 8, 256 tokens"
    yield measured(f"{what}: step", median(s for lap in laps for s in lap["seconds"]), "s")
    for phase in ("sync", "rollout", "train", "sleep", "wake"):
        spent = median(lap["phases"].get(phase, 0.0) for lap in laps)
        yield measured(f"{what}: {phase}", 1e3 * spent, "ms")
    facts = [lap["measured"] for lap in laps]
    unequal = sum(one["onpolicy/mismatched_tokens"] for one in facts)
    yield measured(f"{what}: mismatched tokens", unequal, "tokens", at_most=0)
    compared_tokens = sum(one["onpolicy/compared_tokens"] for one in facts)
    yield measured(f"{what}: compared tokens", compared_tokens, "tokens", at_least=1)
    shapes = LoraConfig(rank=RANK).shapes(read_spec(model))
    expected = 2 * sum(math.prod(shape) for shape in shapes.values())
    pushed = max(one[PUSH_BYTES] for one in facts)
    yield compared(
        f"{what}: push",
        pushed,
        "bytes",
        peer="adapters in bfloat16",
        peer_value=expected,
        at_most=1.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="passes, step")
    parser.add_argument("--shapes", nargs="+", choices=QWEN3, default=["0.6B", "4B"])
    parser.add_argument("--quick", action="store_true", help="few repetitions of each")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    parts = options.parts or PARTS
    rows = list[Row]()
    if "passes" in parts:
        for name in options.shapes:
            rows += passes(name, 3 if options.quick else REPEATS)
    if "step" in parts:
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            rows += grpo_step(Path(name), options.quick)
    return finish(
        __file__,
        ("torch", "triton", "numpy", "torch_memory_saver"),
        rows,
        save=options.save,
        machine=gpu_machine(),
        **gpu(),
    )


if __name__ == "__main__":
    sys.exit(main())
