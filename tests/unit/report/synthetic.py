"""Synthetic run folders for tests, with any number of steps, ranks and samples.

The same seed gives the same folder.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.observe.metrics_log import MetricsLog
from spmd_rl.observe.run_folder import RunFolder
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample, SampleStatus

BEGAN_S = 1_760_000_000.0
STEP_S = 0.4
EOS = 0
HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script>\u2028'\"&amp;{{data}}\u202e"
)
WORDS = "first we add the units then carry one so 7 + 8 = 15 and the answer is".split()
PLAN = {
    "world_size": 4,
    "roles": {"trainer": {"ranks": [0, 1, 2, 3], "axes": {"dp": 1, "fsdp": 4, "tp": 1}}},
    "routes": [
        {"name": f"model.layers.{i}.mlp.up_proj.weight", "route": "alias", "bytes": 0}
        for i in range(20)
    ],
}


def make_run(
    path: Path,
    num_steps: int = 120,
    num_ranks: int = 4,
    *,
    seed: int = 0,
    settings: str = "",
    text: str | None = None,
    sample_steps: Sequence[int] | None = None,
    group_size: int = 8,
    tokenizer: bool = False,
) -> Path:
    """A whole run folder. `text` is what every answer says, `sample_steps` which steps left samples
    (a few by default).

    With `tokenizer` the run has exported one, and the samples' token ids are its own.
    """
    rng = random.Random(seed)
    config = (
        f'steps = {num_steps}\nmodel = "models/tiny"\n{settings}\n'
        f'[run]\nseed = {seed}\nname = "{path.name}"\n'
    )
    run = RunFolder.open(path, config, PLAN)
    encode = write_tokenizer(run.hf) if tokenizer else random_tokens
    log = MetricsLog(run.metrics)
    for step in range(1, num_steps + 1):
        log.write(step, metrics(step, num_steps, rng))
    log.close()
    for step in (
        sample_steps if sample_steps is not None else sorted({1, max(1, num_steps // 2), num_steps})
    ):
        run.write_samples(
            step, [group(uid, step / num_steps, rng, encode, text, group_size) for uid in range(6)]
        )
    last = min(num_steps, 40)
    write_trace(path, range(1, last + 1), num_ranks, rng)
    return path


def metrics(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    done = 1 - math.exp(-4 * step / num_steps)
    rollout_s, train_s = 0.2 + rng.uniform(0, 0.03), 0.15 + rng.uniform(0, 0.02)
    slow = 2.0 if step == 1 else 0.0
    return {
        "reward/mean": min(1.0, max(0.0, 0.1 + 0.8 * done + rng.gauss(0, 0.04))),
        "reward/std": 0.5 - 0.3 * done,
        "reward/solve_none": 0.6 * (1 - done),
        "reward/solve_all": 0.7 * done,
        "rollout/response_tokens_mean": 60 + 100 * done + rng.gauss(0, 6),
        "rollout/truncated": 0.1 * (1 - done),
        "onpolicy/mismatched_tokens": 0,
        "onpolicy/compared_tokens": 5120,
        "onpolicy/max_abs_dlogp": 0.0,
        "onpolicy/k3": 0.0,
        "train/loss": rng.gauss(0, 0.03),
        "train/grad_norm": 1.2 - 0.7 * done + abs(rng.gauss(0, 0.1)),
        "train/entropy": 2.2 * (1 - 0.8 * done) + rng.gauss(0, 0.03),
        "train/clip_frac": 0.02 * (1 - done) + abs(rng.gauss(0, 0.002)),
        "train/lr": 1e-4 * min(1.0, step / 10),
        "time/rollout": rollout_s,
        "time/train": train_s,
        "time/sync": 0.01,
        "time/sleep": 0.006,
        "time/wake": 0.008,
        "time/step": slow + rollout_s + train_s + 0.04,
        "rollout/tokens_per_s": 8000 + rng.gauss(0, 300),
        "perf/train_tokens_per_s": 21000 + rng.gauss(0, 700),
        "perf/controller_share": 0.03,
        "memory/gpu_peak_gib": 61.5 + 4 * done,
        "eval/gsm8k": 0.2 + 0.5 * done,
    }


Encode = Callable[[str], Sequence[int]]


def group(
    uid: int,
    done: float,
    rng: random.Random,
    encode: Encode,
    text: str | None = None,
    size: int = 8,
) -> Group:
    a, b = rng.randrange(1000), rng.randrange(1000)
    question = text or f"What is {a} + {b}?\nThink, then answer."
    prompt = Prompt(uid, np.array([1, 2], np.int32), text=question, answer=str(a + b))
    return Group(
        prompt, [sample(uid, index, done, rng, encode, text, a + b) for index in range(size)]
    )


def sample(
    uid: int,
    index: int,
    done: float,
    rng: random.Random,
    encode: Encode,
    text: str | None,
    answer: int,
) -> Sample:
    said = text
    if not said:
        words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(12, 60)))
        said = f"{words} → naïve\n{answer}"
    status: SampleStatus = "completed" if rng.random() < 0.8 else "truncated"
    tokens = [*encode(said), *([EOS] if status == "completed" else [])]
    return Sample(
        prompt_uid=uid,
        index=index,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.array([rng.expovariate(1.5 + 4 * done) for _ in tokens], np.float32),
        versions=np.full(len(tokens), 3, np.int32),
        status=status,
        text=said,
        reward=float(rng.random() < 0.15 + 0.8 * done),
        parts={"format": 1.0},
    )


def random_tokens(text: str) -> list[int]:
    return [1 + ord(letter) for letter in text[::3]]


def write_tokenizer(folder: Path) -> Encode:
    """A small byte-level BPE, whose tokens may be parts of a character, with end-of-sequence as
    token 0.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def write_trace(run: Path, steps: range, num_ranks: int, rng: random.Random) -> None:
    """Write the spans that controller and ranks would record, as observe/trace.py does."""
    (run / "traces").mkdir()
    controller: list[Any] = [header("controller", None)]
    ranks: list[list[Any]] = [[header(f"rank {rank}", rank)] for rank in range(num_ranks)]
    for step in steps:
        at = int((step - steps[0]) * STEP_S * 1e9)
        end = at + int(0.38e9)
        controller.append(span("step", at, end, step=step))
        for phase, call, start, length in (
            ("sync", "weights.push", 0.0, 0.012),
            ("rollout", "rollout.generate", 0.015, 0.2),
            ("train", "trainer.train_step", 0.22, 0.15),
        ):
            begin, over = at + int(start * 1e9), at + int((start + length) * 1e9)
            controller.append(span(phase, begin, over, step=step))
            controller.append(
                span(call, begin + 100_000, over - 100_000, lane="calls", phase=phase)
            )
            for lines in ranks:
                late = int(rng.uniform(0.0, 0.08) * (over - begin))
                inner = span(
                    call,
                    begin + 300_000,
                    over - 400_000 - late,
                    phase=phase,
                    role=call.split(".")[0],
                )
                lines.extend(parts_of(inner, rng))
                lines.append(inner)
    for lines in [controller, *ranks]:
        name = lines[0]["process"].replace(" ", "_")
        (run / "traces" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )


def parts_of(outer: list[Any], rng: random.Random) -> list[list[Any]]:
    """What a call consists of: a few spans that follow one another inside it."""
    names = {
        "trainer.train_step": ["forward", "backward", "optimiser"],
        "rollout.generate": ["prefill", "decode", "grade"],
    }
    found, at = [], outer[1]
    for name in names.get(outer[0], []):
        length = int(outer[2] * rng.uniform(0.2, 0.33))
        found.append([name, at, length, "MainThread", {"phase": outer[4]["phase"]}])
        at += length
    return found


def header(process: str, rank: int | None) -> dict[str, Any]:
    return {
        "process": process,
        "rank": rank,
        "host": "node1",
        "pid": 100,
        "began_unix_ns": int(BEGAN_S * 1e9),
    }


def span(name: str, start_ns: int, end_ns: int, lane: str = "MainThread", **args: Any) -> list[Any]:
    return [name, start_ns, end_ns - start_ns, lane, args]
