"""Native engines with random weights in few bits, and the time of their decoding steps.

Weights are made and rounded one by one on the GPU, where they are never whole.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from benchmarks.shapes import random_weights
from spmd_rl.model.formats import WeightFormat
from spmd_rl.model.formats.coded_cache import kv_exponents
from spmd_rl.model.formats.coded_tensors import as_codes, as_rounded, hold_codes
from spmd_rl.model.hf import fill, own_parts
from spmd_rl.model.network import CausalLM
from spmd_rl.model.parts.part import WHOLE, ModelPart
from spmd_rl.model.spec import ModelSpec
from spmd_rl.rollout.engine import Request, SamplingConfig
from spmd_rl.rollout.native.config import NativeEngineConfig
from spmd_rl.rollout.native.engine import NativeEngine

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIRST_STEPS, LAST_STEPS = 20, 2  # that are not timed, of those in which all sequences run


def model_of(
    spec: ModelSpec, cfg: NativeEngineConfig, numbers: WeightFormat, part: ModelPart = WHOLE
) -> CausalLM:
    """Return a model, or a rank's part of it, whose weights are the numbers that codes of a format
    stand for.

    It holds codes where the config says so, else the numbers in bfloat16.
    """
    with torch.device("meta"):
        model = CausalLM(spec, exponents=kv_exponents(cfg), part=part)
        model = model.to(getattr(torch, cfg.dtype)).requires_grad_(False)
        hold_codes(model, spec, cfg.weights)
    model.to_empty(device=DEVICE)
    convert = as_rounded if cfg.weights == "full" else as_codes
    fill(model, own_parts(model, convert(random_weights(spec), spec, numbers)))
    return model


def engine_of(
    spec: ModelSpec,
    cfg: NativeEngineConfig,
    numbers: WeightFormat,
    reserved_bytes: int = 0,
    part: ModelPart = WHOLE,
) -> NativeEngine:
    """Return an engine with the model of `model_of`. `reserved_bytes` is as in `build`."""
    model = model_of(spec, cfg, numbers, part)
    engine = NativeEngine(model, cfg, DEVICE, reserved_bytes=reserved_bytes)
    engine.sink().commit(0)
    return engine


def measure(
    engine: NativeEngine, batch: int, prompt_tokens: int, new_tokens: int
) -> tuple[float, dict[int, bytes]]:
    """Return the milliseconds of a step, and tokens and log-probs of each sample.

    The time is the median over the steps in which all sequences run.
    """
    rng = np.random.default_rng(batch)
    sampling = SamplingConfig(max_tokens=new_tokens, ignore_eos=True)
    for uid in range(batch):
        prompt = rng.integers(2, 1000, prompt_tokens).astype(np.int32)
        engine.submit(Request(uid, 0, prompt, sampling, seed=1))
    times, drawn = [], {}
    while engine.has_work:
        began = time.perf_counter()
        output = engine.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if len(output.tokens) == batch:
            times.append(1e3 * (time.perf_counter() - began))
        for one in output.finished:
            drawn[one.prompt_uid] = one.tokens.tobytes() + one.logprobs.tobytes()
    return statistics.median(times[FIRST_STEPS:-LAST_STEPS]), drawn
