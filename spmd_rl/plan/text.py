"""Plan as text: split, process groups, what a push moves, memory, and what recomputation saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from spmd_rl.mesh.split import Placement
from spmd_rl.model.spec import Head
from spmd_rl.offload.ledger import Entry, Ledger, as_size
from spmd_rl.plan.needs import TRAIN
from spmd_rl.plan.push import Push
from spmd_rl.plan.resolve import RunPlan
from spmd_rl.plan.savings import EXTRA_OPERATIONS
from spmd_rl.train.config import TrainerConfig
from spmd_rl.train.cost.memory import step_sizes

MAX_ROWS = 8  # of a list; the rest is counted


def lines(plan: RunPlan) -> Iterator[str]:
    """Yield the plan as text."""
    yield from _split(plan)
    yield "process groups"
    groups = plan.groups
    yield from _first_rows(
        (f"  {name:12} ranks {_ranks_text(ranks)}" for name, ranks in groups), len(groups)
    )
    if plan.spec is None:
        return
    yield f"model        {plan.spec.family}, {plan.spec.num_parameters:,} parameters"
    if plan.spec.impl == "transformers":
        yield "estimates    are all sizes and times but those of weights: transformers computes it"
    if plan.spec.num_experts:
        yield (
            f"a token      takes {plan.spec.num_active_parameters:,} of them, and "
            f"{plan.spec.flops_per_token / 1e9:.2f} GFLOP forward besides attention"
        )
    for name, sentence in plan.formats.items():
        yield f"{name:12} {sentence}"
    yield from _lengths(plan)
    if plan.push is not None:
        yield _push(plan.push, [rank for rank, _ in plan.ledgers.distinct()])
    if plan.on_gpu:
        yield (
            "memory       planned as for GPUs: bfloat16, with CUDA contexts and "
            "NCCL's communicators"
        )
    if plan.uncounted:
        yield f"not counted  {', '.join(plan.uncounted)}: no class says what memory it takes"
    yield from _sleep(plan)
    if plan.queue and plan.queue.num_waiting:
        yield f"waiting      {plan.queue}"
    yield from _memory(plan)
    yield from _recompute(plan)


def _split(plan: RunPlan) -> Iterator[str]:
    yield f"world of {plan.world_size}"
    for placement in plan.placements.values():
        axes, ranks = _axes_text(placement), _ranks_text(placement.ranks)
        yield f"  {placement.name:8} {axes:28} ranks {ranks}"
    for role in plan.roles:
        if role.placement.name != role.name:
            ranks = _ranks_text(role.placement.ranks)
            yield f"  {role.name:8} {'with ' + role.placement.name:28} ranks {ranks}"
    if idle := plan.idle:
        yield f"  {'idle':8} {'no role':28} ranks {_ranks_text(idle)}"


def _lengths(plan: RunPlan) -> Iterator[str]:
    """Yield the tokens of sequences and of micro-batches that the memory below is for."""
    parts = []
    if plan.queue is not None:
        tokens = plan.queue.running.num_tokens
        parts.append(f"sequences of {tokens:,} tokens, of which sampling.max_tokens are answers")
    trainers = (role.trainer for role in plan.roles if role.name == TRAIN)
    parts += [
        f"micro-batches of {one.max_tokens:,} (trainer.max_tokens)" for one in trainers if one
    ]
    if parts:
        yield f"lengths      {'; '.join(parts)}"


def _push(push: Push, ranks: Sequence[int]) -> str:
    """Return what a push moves; `ranks` has one for each set of roles."""
    sends, receives = (max(map(number, ranks)) for number in (push.num_sends, push.num_receives))
    return (
        f"weight push  {as_size(push.copy_bytes)} to each engine; a rank sends to {sends:,} others "
        f"at most, and receives from {receives:,}"
    )


def _sleep(plan: RunPlan) -> Iterator[str]:
    if plan.sleep.sentence:
        yield f"sleep        {plan.sleep.sentence}"
    elif any(plan.sleep.sleeping.values()):
        yield (
            "sleep        shown with all that may sleep; a run lets sleep what its GPU has no room "
            "for (--gpu-gib G)"
        )


def _memory(plan: RunPlan) -> Iterator[str]:
    for rank, ledger in plan.ledgers.distinct():
        if names := plan.ledgers.names[rank]:
            yield from _table(f"memory of {' + '.join(names)}, most on rank {rank}", ledger)
            yield from _host_table(ledger)


def _table(title: str, ledger: Ledger) -> Iterator[str]:
    yield f"{title:42}" + "".join(f"{phase:>12}" for phase in ledger.phases)
    counted = {phase: set(map(id, ledger.counted(phase))) for phase in ledger.phases}

    def cell(entry: Entry, phase: str) -> str:
        if not entry.is_in(phase):
            return "-"
        size = as_size(entry.num_bytes)
        return size if id(entry) in counted[phase] else f"({size})"

    for entry in filter(lambda entry: entry.num_bytes, ledger.entries):
        cells = [cell(entry, phase) for phase in ledger.phases]
        yield f"  {entry.tag:40}" + "".join(f"{text:>12}" for text in cells)
    yield f"  {'all':40}" + "".join(
        f"{as_size(ledger.resident_bytes(phase)):>12}" for phase in ledger.phases
    )


def _host_table(ledger: Ledger) -> Iterator[str]:
    if not ledger.host_bytes():
        return
    yield "  in host memory, all the time"
    for entry in filter(lambda entry: entry.host_bytes, ledger.entries):
        yield f"    {entry.tag:38}{as_size(entry.host_bytes):>12}"
    yield f"    {'all':38}{as_size(ledger.host_bytes()):>12}"


def _recompute(plan: RunPlan) -> Iterator[str]:
    """Yield a row for each choice that the trainer's backend has beside its other settings: the
    bytes of activations at their peak, and the share of operations added.
    """
    train = next((role for role in plan.roles if role.name == TRAIN), None)
    if train is None or plan.spec is None:
        return
    cfg: TrainerConfig = train.cfg
    if choices := cfg.backend.recompute_choices:
        yield f"{'trainer.backend.recompute':30}{'activations':>14}{'more operations':>18}"
    head: Head = getattr(train.role, "HEAD", "lm")
    for choice, backend in choices.items():
        sizes = step_sizes(plan.spec, replace(cfg, backend=backend), train.placement, head)
        mark = "*" if backend == cfg.backend else " "
        peak, extra = as_size(sizes.activations.peak), f"{EXTRA_OPERATIONS[choice]:.0%}"
        yield f"{mark} {choice:28}{peak:>14}{extra:>18}"


def _axes_text(placement: Placement) -> str:
    """Return how the ranks of a role hold its model; engines have whole ones, or share experts."""
    if placement.name == "infer":
        count, tp, ep = placement.data_size, placement.axes["tp"], placement.axes.get("ep", 1)
        if ep > 1:
            return f"{count} copies, of whose experts each rank has 1 of {ep} parts"
        copies = f"{count} whole {'copies' if count > 1 else 'copy'}"
        return copies if tp == 1 else f"{copies} x tp {tp}"
    return " x ".join(f"{axis} {size}" for axis, size in placement.axes.items())


def _ranks_text(ranks: tuple[int, ...]) -> str:
    consecutive = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return (
        f"{ranks[0]}-{ranks[-1]}" if consecutive and len(ranks) > 2 else ", ".join(map(str, ranks))
    )


def _first_rows(rows: Iterator[str], num_rows: int) -> Iterator[str]:
    """Yield the first rows, and how many more there are."""
    yield from islice(rows, MAX_ROWS)
    if num_rows > MAX_ROWS:
        yield f"  ... and {num_rows - MAX_ROWS} more"
