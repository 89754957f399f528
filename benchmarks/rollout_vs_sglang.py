"""Whole rollout of our engine and of SGLang: 512 prompts of 128 tokens with 8 samples each.

The answers have very unequal lengths. The number of new tokens of each sample is drawn once from a
log-normal distribution with median 192, clipped to 64..2048, so a few long samples outlive the
rest. Both engines get the same 4,096 requests at once and run at most 512 together. Tokens per
second are new tokens over the time from handing over the first request to the last answer. The
engines take turns (engines.py says how both run). The benchmark also checks that our engine keeps
its rows in use while samples wait.

    python -m benchmarks.rollout_vs_sglang --sglang SITE [--save] [0.6B 8B]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.engines import Pair
from benchmarks.record import compared, measured
from benchmarks.sglang_cli import beside_sglang
from benchmarks.table import Row
from spmd_rl.rollout.native.scheduler import REFILL_SHARE

PROMPTS, SAMPLES, PROMPT_TOKENS = 512, 8, 128
MEDIAN, SIGMA, SHORTEST, LONGEST = 192, 0.8, 64, 2048
BARS = {"0.6B": 1.2, "8B": 1.0}
FILL_BAR = 1 - 1 / REFILL_SHARE
WARMUP, REPEATS = 8, 3  # prompts; rollouts of each engine


def new_tokens(seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, PROMPTS * SAMPLES)
    return np.clip(drawn, SHORTEST, LONGEST).astype(int).tolist()


def measure(name: str, engines: Pair, repeats: int) -> Iterator[Row]:
    lengths, speed, fills = new_tokens(), {}, []
    for _, engine in engines:
        count = WARMUP * SAMPLES
        engine.ask(
            prompts=[PROMPT_TOKENS] * WARMUP,
            samples=SAMPLES,
            new_tokens=list(range(1, count + 1)),
            seed=1,
        )
    for repeat in range(repeats):
        for kind, engine in engines:
            reply = engine.ask(
                prompts=[PROMPT_TOKENS] * PROMPTS,
                samples=SAMPLES,
                new_tokens=lengths,
                seed=2 + repeat,
            )
            speed.setdefault(kind, []).append(sum(lengths) / reply["seconds"])
            fills += [reply["fill"]] if kind == "ours" else []
            print(
                f"Qwen3-{name} {kind}: {sum(lengths)} tokens in {reply['seconds']:.1f} s",
                flush=True,
            )
    ours, theirs = (statistics.median(speed[kind]) for kind in ("ours", "sglang"))
    what = f"Qwen3-{name}, {PROMPTS} prompts x {SAMPLES}, {sum(lengths)} new tokens"
    yield compared(what, ours, "tokens/s", peer="SGLang", peer_value=theirs, at_least=BARS[name])
    yield measured(
        f"{what}: rows in use while samples wait", statistics.median(fills), "", at_least=FILL_BAR
    )


if __name__ == "__main__":
    sys.exit(beside_sglang(__file__, __doc__, BARS, REPEATS, measure))
