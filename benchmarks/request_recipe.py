"""Recipe that keeps thousands of short requests in flight, for request_cost.py.

spmd-rl run benchmarks.request_recipe --nproc 2 --requests 20000
"""

from __future__ import annotations

import cProfile
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

import spmd_rl as rl
from spmd_rl.controller.handle import Handle

FILE, PROFILE = "requests.json", "controller.prof"


@dataclass(frozen=True)
class Config:
    model: str = "examples/arithmetic/model"
    requests: int = 20_000  # in all
    concurrent: int = 4096  # in flight
    prompt_tokens: int = 24  # of each request
    every: int = 10_000  # requests between two readings
    profile: bool = False  # write a profile of the recipe's thread to controller.prof
    run: rl.RunConfig = field(default_factory=rl.RunConfig)
    split: rl.Split = field(default_factory=rl.Split)
    sampling: rl.SamplingConfig = field(
        default_factory=lambda: rl.SamplingConfig(max_tokens=4, ignore_eos=True)
    )
    engine: rl.NativeEngineConfig = field(default_factory=rl.NativeEngineConfig)
    trainer: rl.TrainerConfig = field(default_factory=lambda: rl.TrainerConfig(init="random"))


@dataclass(frozen=True)
class Usage:
    """What a process has used so far: seconds of the processor, and the bytes it alone has."""

    processor_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Reading:
    """What the controller and each rank have used once so many requests have ended."""

    num_requests: int
    seconds: float
    controller: Usage
    ranks: list[Usage]


class Gauge(rl.Role):
    """Reads what the process of its rank has used."""

    @rl.concurrent
    @rl.collective
    def read(self) -> rl.Sharded[list[Usage]]:
        return [usage()]


def usage() -> Usage:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    own_kib = (int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return Usage(time.process_time(), sum(own_kib) << 10)


def new_prompts(num_tokens: int) -> Iterator[rl.Prompt]:
    """Yield prompts of random tokens, without end."""
    uid, rng = 0, np.random.default_rng(0)
    while True:
        for tokens in rng.integers(2, 100, (1000, num_tokens), dtype=np.int32):
            yield rl.Prompt(uid, tokens)
            uid += 1


def ask(rollout: rl.Rollout, gauge: Gauge, cfg: Config) -> list[Reading]:
    """Ask for an answer to each prompt, the next as soon as one has ended."""
    prompts, ended = islice(new_prompts(cfg.prompt_tokens), cfg.requests), rl.CompletionQueue[Any]()
    readings: list[Reading] = []

    def read(num_requests: int) -> None:
        ranks = gauge.read.call()
        readings.append(Reading(num_requests, time.perf_counter(), usage(), ranks))

    read(0)
    for prompt in islice(prompts, cfg.concurrent):
        ended.add(rollout.complete.start(prompt, cfg.sampling))
    num_ended = 0
    while (call := ended.wait()) is not None:
        if len(call.wait().samples[0].tokens) != cfg.sampling.max_tokens:
            raise rl.SpmdError("a request of the benchmark ended early")
        num_ended += 1
        if num_ended % cfg.every == 0:
            read(num_ended)
        for prompt in islice(prompts, 1):
            ended.add(rollout.complete.start(prompt, cfg.sampling))
    return readings


def left_over(rollout: rl.Rollout) -> dict[str, int]:
    """Return what controller and engines still hold of requests, all of which have ended."""
    handle = cast(Handle, rollout)
    balancer, calls = handle.balancer, handle.dispatcher.calls
    return {
        "calls of the controller": sum(map(calls.num_unanswered, handle.placement.ranks)),
        "keys of the router": len(balancer._by_key),
        "cost of the router": sum(balancer._cost),
        "groups of the ranks": len(rollout.partials.call()),
    }


def main(ctl: rl.Controller, cfg: Config) -> None:
    roles = ctl.world.split(cfg.split)
    gauge = ctl.spawn(Gauge, cfg, on=ctl.world.split({"gauge": rl.RoleSplit()}).gauge)
    trainer = ctl.spawn(rl.Trainer, cfg.trainer, on=roles.train, model=cfg.model)
    rollout = ctl.spawn(rl.Rollout, cfg.engine, on=roles.infer, model=cfg.model, seed=cfg.run.seed)
    ctl.link(trainer, rollout).push(version=0)
    profile = cProfile.Profile()
    if cfg.profile:
        profile.enable()
    readings = ask(rollout, gauge, cfg)
    profile.disable()
    if cfg.profile:
        profile.dump_stats(ctl.run_folder / PROFILE)
    found = {"readings": [asdict(one) for one in readings], "left": left_over(rollout)}
    (ctl.run_folder / FILE).write_text(json.dumps(found))
