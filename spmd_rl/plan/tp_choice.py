"""Choice of `split.infer.tp`: the ranks that share an engine for which a rollout takes least time.

A rollout is taken as waves: as many sequences as an engine holds decode at once, each to the limit
of `sampling.max_tokens`. Prompts are not counted. All times are floors (decode_floor.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from spmd_rl.errors import ConfigError, PlanError
from spmd_rl.mesh.split import Placement
from spmd_rl.model.parts.part import ROW_SHARDS
from spmd_rl.model.spec import ModelSpec
from spmd_rl.plan.concurrency import Queue
from spmd_rl.plan.decode_floor import Gpu, StepTime, decode_work, gpu_of
from spmd_rl.plan.needs import INFER, RunNeeds
from spmd_rl.plan.resolve import GPUS_PER_HOST, RunPlan, resolve
from spmd_rl.plan.savings import Flags
from spmd_rl.rollout.kinds import EngineConfig

TP_FLAG = "--split.infer.tp={}"
LEAST_GAIN = 0.05  # of the time; more ranks that gain less are not chosen
PARTS = tuple(one.name for one in fields(StepTime))  # of a step
WORDS = {
    "weights_s": "weights, which ranks that share an engine read once for all its sequences",
    "kv_s": "keys and values, which ranks that share an engine divide",
    "arithmetic_s": "arithmetic, which ranks that share an engine divide",
}


@dataclass(frozen=True)
class RolloutFloor:
    """The least time of a rollout with `tp`: `step` is that of a full wave, at its mean length."""

    tp: int
    num_engines: int
    queue: Queue
    step: StepTime
    seconds: float


@dataclass(frozen=True)
class TpChoice:
    """The floors of each tp that fits, by rising tp, on GPUs with the rates of `gpu`.

    `planned` is the run's own tp. All engines together have `num_sequences`.
    """

    floors: Sequence[RolloutFloor]
    gpu: Gpu
    planned: int
    num_sequences: int
    num_tokens: int  # of each at its end

    @property
    def best(self) -> RolloutFloor:
        """The least tp with a time near the least."""
        least = min(one.seconds for one in self.floors)
        return next(one for one in self.floors if one.seconds * (1 - LEAST_GAIN) <= least)

    @property
    def why(self) -> str:
        """Which tp is the best, and why, in a sentence."""
        best, first = self.best, self.floors[0]
        if len(self.floors) == 1:
            return f"tp {best.tp}: no other fits this run"
        if best is first:
            return f"tp {best.tp}: {_why_no_more(best, self.floors[1])}"
        gain = f"tp {best.tp}: {first.seconds / best.seconds:.2f}x faster than tp {first.tp}"
        return f"{gain}, {_why_more(first, best)}"


def tp_choice(
    configure: Callable[[Flags], object], flags: Flags, plan: RunPlan, gpu_bytes: int
) -> TpChoice | None:
    """Return the floors for a run with `flags`, which is planned as `plan`, on such GPUs.

    None where there is no choice, on one rank, and where they are not known: without an engine, a
    number of prompts, or a tp that fits.
    """
    gpu, needs = gpu_of(gpu_bytes), RunNeeds.of(configure(flags))
    infer = plan.placements.get(INFER)
    if infer is None or infer.size == 1 or not plan.on_gpu or needs.prompts_per_step is None:
        return None
    planned, floors = infer.axes["tp"], []
    for tp in ROW_SHARDS:
        with_tp = (*flags, TP_FLAG.format(tp))
        other = plan if tp == planned else _resolved(configure, with_tp, plan, gpu_bytes)
        if other is not None and _fits(other, gpu_bytes):
            found = rollout_floor(RunNeeds.of(configure(with_tp)), other, gpu)
            floors += [found] if found else []
    if not floors or plan.queue is None or needs.sampling is None:
        return None
    num_sequences = needs.prompts_per_step * needs.sampling.num_samples
    return TpChoice(floors, gpu, planned, num_sequences, plan.queue.running.num_tokens)


def rollout_floor(needs: RunNeeds, plan: RunPlan, gpu: Gpu) -> RolloutFloor | None:
    """Return the least time of a planned run's rollout; None without engine, model or sampling."""
    if plan.spec is None or plan.queue is None or needs.engine is None or needs.sampling is None:
        return None
    infer, queue = plan.placements.infer, plan.queue
    num_answered = min(needs.sampling.max_tokens, queue.running.num_tokens)
    num_keys = queue.running.num_tokens - num_answered / 2
    step = _steps(plan.spec, needs.engine, infer, gpu, num_keys)
    full, rest = divmod(queue.num_asked, queue.num_at_once)
    seconds = full * step(queue.num_at_once).seconds + (step(rest).seconds if rest else 0.0)
    return RolloutFloor(
        infer.axes["tp"],
        infer.data_size,
        queue,
        step(queue.num_at_once),
        num_answered * seconds,
    )


def lines(choice: TpChoice) -> Iterator[str]:
    """Yield a table of the floors, the best tp, and why."""
    yield (
        f"rollout      of {choice.num_sequences:,} sequences up to {choice.num_tokens:,} tokens: "
        f"floors at the rates of an {choice.gpu.name}, not measurements"
    )
    parts = (name.removesuffix("_s") for name in PARTS)
    heads = ("engines", "at once", "waves", *parts, "a step", "rollout")
    yield f"  {'split.infer.tp':16}" + "".join(f"{head:>12}" for head in heads)
    for floor in choice.floors:
        cells = (
            f"{floor.num_engines:,}",
            f"{floor.queue.num_at_once:,}",
            f"{floor.queue.num_waves:,}",
            *(_milliseconds(getattr(floor.step, name)) for name in PARTS),
            _milliseconds(floor.step.seconds),
            f"{floor.seconds:.1f} s",
        )
        mark = "*" if floor.tp == choice.planned else " "
        yield f"{mark} {floor.tp:<16}" + "".join(f"{cell:>12}" for cell in cells)
    yield f"  least time with {choice.why}"


def _steps(
    spec: ModelSpec, cfg: EngineConfig, infer: Placement, gpu: Gpu, num_keys: float
) -> Callable[[int], StepTime]:
    """Return the time of a step by its number of sequences."""
    work = decode_work(spec, cfg, infer.axes["tp"], infer.axes.get("ep", 1))
    return lambda num_rows: work.time(gpu, num_rows, num_keys)


def _why_more(first: RolloutFloor, best: RolloutFloor) -> str:
    """Return why more ranks to an engine pay: room for more sequences at once, or else the part of
    a step of which they save most.
    """
    if best.queue.num_waves < first.queue.num_waves:
        return (
            f"because keys and values overflow there: an engine holds {first.queue.num_at_once:,} "
            f"of {first.queue.num_asked:,} sequences at once, which makes "
            f"{first.queue.num_waves:,} waves instead of {best.queue.num_waves:,}"
        )
    saved = {name: getattr(first.step, name) - getattr(best.step, name) for name in WORDS}
    name = max(WORDS, key=saved.__getitem__)
    share = getattr(first.step, name) / first.step.seconds
    return f"whose step is {share:.0%} {WORDS[name]}"


def _why_no_more(best: RolloutFloor, more: RolloutFloor) -> str:
    """Return why `more` ranks to an engine do not pay."""
    kv = best.step.kv_s / best.step.seconds
    if (sums := more.step.sums_s / more.step.seconds) > LEAST_GAIN:
        return f"with tp {more.tp} the latency of sums would be {sums:.0%} of a step"
    if kv > 1 / 2:
        return f"keys and values are {kv:.0%} of a step, and a GPU reads as many with any tp"
    return f"tp {more.tp} would gain less than {LEAST_GAIN:.0%}"


def _resolved(
    configure: Callable[[Flags], object], flags: Flags, like: RunPlan, gpu_bytes: int
) -> RunPlan | None:
    """Return the plan with `flags` in the world of `like`; None where they are refused."""
    per_host = GPUS_PER_HOST if like.memory is None else like.memory.ranks_per_host
    try:
        return resolve(configure(flags), like.world_size, gpu_bytes, ranks_per_host=per_host)
    except (ConfigError, PlanError):
        return None


def _fits(plan: RunPlan, gpu_bytes: int) -> bool:
    try:
        plan.require(gpu_bytes)
    except PlanError:
        return False
    return True


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds else "-"
