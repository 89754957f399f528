"""Decode step of our engine and of SGLang in its fastest mode, on one GPU.

SGLang's mode is not deterministic; engines.py says how both run. The time per step is
(T(512) - T(256)) / 256, where T(n) is the time to generate n tokens for each prompt of the batch
in one call. So start-up, prefill and hand-over cancel. T is the median over repetitions in which
the two engines take turns. After the warm-up, the prompts are in both prefix caches. As a check,
our own time of `step` is given: the median over steps in which the whole batch decodes.

    python -m benchmarks.engine_vs_sglang --sglang SITE [--save] [0.6B 8B 30B-A3B@12]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator

from benchmarks import shapes
from benchmarks.engines import Pair
from benchmarks.kernels.timing import copy_bytes_per_s
from benchmarks.peer import Peer
from benchmarks.record import compared, measured
from benchmarks.sglang_cli import beside_sglang
from benchmarks.table import Row
from benchmarks.training import spec_of

MIXTURE = f"{shapes.MIXTURE}@12"  # layers, so that both engines have room
HYBRID = "3.5-9B@8"
# batch, prompt
CASES = {
    "0.6B": ((64, 128), (256, 128)),
    "8B": ((1, 128), (64, 128), (256, 128), (64, 2048)),
    MIXTURE: ((1, 128), (8, 128), (64, 128), (256, 128)),
    HYBRID: ((1, 128), (64, 128), (256, 128)),
}
SHORT, LONG = 256, 512
WARMUP_TOKENS, REPEATS = LONG, 3
BARS = {("0.6B", 64): 0.6, (MIXTURE, 1): 0.6, (MIXTURE, 8): 0.8, (MIXTURE, 64): 0.9}
USUAL_BARS = {MIXTURE: 0.9, HYBRID: 0.9}
FLOOR_BARS = {64: 1.15, 256: 1.15}  # batches


def run(peer: Peer, batch: int, prompt: int, new: int) -> dict[str, float]:
    return peer.ask(
        prompts=[prompt] * batch, samples=1, new_tokens=[new] * batch, seed=batch + prompt
    )


def step_ms(
    engines: Pair, batch: int, prompt: int, repeats: int, lengths: tuple[int, int] = (SHORT, LONG)
) -> tuple[float, float, float]:
    """Return the milliseconds of a step of ours, of SGLang's, and of ours by its own clock."""
    times: dict[tuple[str, int], list[float]] = {}
    steps: list[float] = []
    for _, engine in engines:
        run(engine, batch, prompt, WARMUP_TOKENS)
    for _ in range(repeats):
        for kind, engine in engines:
            for new in lengths:
                reply = run(engine, batch, prompt, new)
                times.setdefault((kind, new), []).append(reply["seconds"])
                steps += [reply["step_s"]] if kind == "ours" else []
    print(f"batch {batch}, prompt {prompt}: {times}", flush=True)
    short, long = lengths
    ours, theirs = (
        1e3
        * (statistics.median(times[kind, long]) - statistics.median(times[kind, short]))
        / (long - short)
        for kind in ("ours", "sglang")
    )
    return ours, theirs, 1e3 * statistics.median(steps)


def step_bytes(name: str, batch: int) -> int:
    """Return the bytes of weights and states that a decoding step has to move, without its keys."""
    spec = spec_of(name)
    table = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
    return 2 * (spec.num_parameters - table) + 2 * batch * spec.state_bytes(2)


def measure(name: str, engines: Pair, repeats: int) -> Iterator[Row]:
    copied = copy_bytes_per_s() if shapes.is_hybrid(name) else 0.0
    for batch, prompt in CASES[name]:
        ours, theirs, clock = step_ms(engines, batch, prompt, repeats)
        what = f"{shapes.title(name)}, batch {batch}, prompt {prompt}"
        print(f"{what}: ours {ours:.2f}, SGLang {theirs:.2f} ms", flush=True)
        bar = BARS.get((name, batch), USUAL_BARS.get(name, 1.0))
        yield compared(f"{what}: step", ours, "ms", peer="SGLang", peer_value=theirs, at_most=bar)
        yield measured(f"{what}: our own clock around step", clock, "ms")
        if shapes.is_hybrid(name):
            floor, bar = 1e3 * step_bytes(name, batch) / copied, FLOOR_BARS.get(batch)
            yield compared(
                f"{what}: step", ours, "ms", peer="bytes moved", peer_value=floor, at_most=bar
            )


if __name__ == "__main__":
    models = [name for name in CASES if name != HYBRID]
    sys.exit(beside_sglang(__file__, __doc__, models, REPEATS, measure))
