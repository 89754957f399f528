"""Recipe that draws the same samples without a reward, with a fast one and with a slow one, in
turns, for slow_reward.py.

spmd-rl run benchmarks.slow_reward_recipe --model FOLDER --nproc 1
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

import spmd_rl as rl
from spmd_rl.recipes.rollout_settings import rollout_settings
from spmd_rl.rollout.request_flow import RequestFlow

FILE, GRADED = "turns.json", "graded.txt"
PLAIN, ASYNC = f"{__name__}:plain", f"{__name__}:awaited"
Grading = Literal["none", "fast", "slow"]
GRADINGS: tuple[Grading, ...] = ("none", "fast", "slow")
SLOW_SHARE = 10  # every tenth sample


@dataclass(frozen=True)
class Config:
    model: str
    samples: int = 160  # of a turn
    prompt_tokens: int = 16
    shortest: int = 16  # answer, in tokens
    longest: int = 96
    turns: int = 1  # of each kind, after one that starts everything
    sleep_s: float = 5.0  # of the slow reward
    reward: str = ASYNC
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    engine: rl.NativeEngineConfig = field(
        default_factory=lambda: rl.NativeEngineConfig(max_batch=48)
    )
    hooks: rl.HookConfig = field(default_factory=rl.HookConfig)


@dataclass(frozen=True)
class Drawn:
    """What the engine drew in a turn, from the first submission to the last token.

    `processor_s` is that of the rank's process, and `gap_s` the longest time between two steps that
    gave tokens.
    """

    num_tokens: int
    seconds: float
    processor_s: float
    gap_s: float


@dataclass(frozen=True)
class Turn:
    """What a turn drew and graded; `whole_s` ends when the last sample is graded."""

    grading: Grading
    drawn: Drawn
    whole_s: float
    reward: float  # of all samples


class TimedRollout(rl.Rollout):
    """The shipped role, which notes when its engine gives tokens."""

    @rl.collective
    def prepare(self) -> None:
        """Watch the engine's steps from now on."""
        self._graded, self._plain = self._flow, RequestFlow(self.engine, self._text_of)
        self._step = self.engine.step
        self.engine.step = self._timed_step  # type: ignore[method-assign]

    @rl.collective
    def begin(self, grading: Grading) -> None:
        """Begin a turn. Nothing is drawn now."""
        self._flow = self._plain if grading == "none" else self._graded
        self._num_tokens, self._gap_s = 0, 0.0
        self._began = self._newest = time.perf_counter(), time.process_time()

    @rl.collective
    def drawn(self) -> Drawn:
        """Return what was drawn since."""
        (began, used), (ended, used_then) = self._began, self._newest
        return Drawn(self._num_tokens, ended - began, used_then - used, self._gap_s)

    def _timed_step(self) -> Any:
        output = self._step()
        if len(output.tokens):
            now = time.perf_counter()
            self._gap_s = max(self._gap_s, now - self._newest[0] if self._num_tokens else 0.0)
            self._newest = now, time.process_time()
            self._num_tokens += len(output.tokens)
        return output


def plain(ctx: rl.HookContext, prompt: rl.Prompt, sample: rl.Sample) -> float:
    _note(ctx.config, prompt)
    if seconds := _sleep_s(ctx.config, prompt):
        time.sleep(seconds)
    return 1.0


async def awaited(ctx: rl.HookContext, prompt: rl.Prompt, sample: rl.Sample) -> float:
    _note(ctx.config, prompt)
    if seconds := _sleep_s(ctx.config, prompt):
        await asyncio.sleep(seconds)
    return 1.0


def _sleep_s(config: Mapping[str, Any], prompt: rl.Prompt) -> float:
    is_slow = prompt.source == "slow" and prompt.uid % SLOW_SHARE == 0
    return config["sleep_s"] if is_slow else 0.0


def _note(config: Mapping[str, Any], prompt: rl.Prompt) -> None:
    """Append the prompt's number to the file of all that was graded, in one write."""
    path = Path(config["run"]["folder"], config["run"]["name"], GRADED)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, b"%d\n" % prompt.uid)
    os.close(descriptor)


def take_turn(rollout: TimedRollout, cfg: Config, number: int, grading: Grading) -> Turn:
    """Draw one sample for each of so many prompts, all asked for at once."""
    rng = np.random.default_rng(0)  # all turns have the same lengths
    lengths = rng.integers(cfg.shortest, cfg.longest, cfg.samples, endpoint=True).tolist()
    prompts = rng.integers(2, 100, (cfg.samples, cfg.prompt_tokens), dtype=np.int32)
    prompts = (prompts + 7 * number) % 98 + 2  # the engine has none of them in its cache
    rollout.begin.call(grading)
    began, calls = time.perf_counter(), []
    for uid, (tokens, length) in enumerate(
        zip(prompts, lengths, strict=True), number * len(lengths)
    ):
        sampling = rl.SamplingConfig(max_tokens=length, ignore_eos=True)
        calls.append(rollout.complete.start(rl.Prompt(uid, tokens, source=grading), sampling))
    samples = [sample for call in rl.as_completed(calls) for sample in call.wait().samples]
    whole_s = time.perf_counter() - began
    drawn = rollout.drawn.call()
    if drawn.num_tokens != sum(lengths):
        raise rl.SpmdError(f"{drawn.num_tokens} tokens were drawn instead of {sum(lengths)}")
    reward = float(np.nansum([sample.reward for sample in samples]))
    return Turn(grading, drawn, whole_s, reward)


def main(ctl: rl.Controller, cfg: Config) -> None:
    on = ctl.world.split({"infer": rl.RoleSplit()}).infer
    rollout = ctl.spawn(TimedRollout, cfg.engine, on=on, **rollout_settings(cfg))
    rollout.prepare.call()
    order = [*GRADINGS, *GRADINGS[::-1]]
    gradings = ["slow", "none", "fast"] + [order[n % len(order)] for n in range(3 * cfg.turns)]
    turns = []
    for number, grading in enumerate(gradings):
        turns.append(take_turn(rollout, cfg, number, grading))
        print(f"{grading}: {turns[-1]}", flush=True)
    found = {
        "turns": [asdict(turn) for turn in turns[len(GRADINGS) :]],
        "num_graded": cfg.samples * sum(grading != "none" for grading in gradings),
    }
    (ctl.run_folder / FILE).write_text(json.dumps(found))
