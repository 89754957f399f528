"""Decision what sleeps: nothing where everything fits at once, else what costs least. Pure.

What a phase does not need may sleep there, as the recipe declares it. Memory whose contents are
dropped costs no copies, so it sleeps first; what is copied to the host and back sleeps last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spmd_rl.offload.ledger import Ledger, TagBytes, as_size
from spmd_rl.offload.phases import ALL, Phases, Tags
from spmd_rl.plan.concurrency import RunningSequences
from spmd_rl.plan.memory import MemoryModel, Sleeping
from spmd_rl.plan.roles import PlannedRole

PAGES = ("kv", "step")  # an engine's step belongs to graphs over its pages


@dataclass(frozen=True)
class Need:
    """What all roles must have room for: `kv_bytes` hold the sequences in `running`.

    `limit_bytes` is the share of a GPU that a run may use, and `host_bytes` what a rank may keep in
    host memory; None: that is not known.
    """

    limit_bytes: int
    kv_bytes: int = 0
    running: RunningSequences | None = None
    host_bytes: int | None = None


@dataclass(frozen=True)
class SleepDecision:
    """Which tags of which role sleep in phases that do not need them, and why, in a sentence.

    `copied_bytes` is what a rank copies to host memory and back in a step. `host_problem` says why
    the host cannot keep what sleeps, "" where it can.
    """

    sleeping: Sleeping
    sentence: str = ""
    copied_bytes: int = 0
    host_problem: str = ""


def choose_sleep(model: MemoryModel, need: Need) -> SleepDecision:
    """Return the least costly set of tags with which every phase fits; all of them if none does.

    A costlier set keeps no less in host memory, so where the host is too small nothing serves.
    """
    sets = sleep_levels(model)
    peaks = [_peak(model, one, need.kv_bytes) for one in sets]
    chosen = next((i for i, peak in enumerate(peaks) if peak <= need.limit_bytes), len(sets) - 1)
    copied = copied_bytes(model, sets[chosen])
    beside = f", keys and values of {need.running} included" if need.running else ""
    awake = (
        f"all roles awake need {as_size(peaks[0])}{beside}, "
        f"and {as_size(need.limit_bytes)} may be used"
    )
    if chosen == 0:
        fits = peaks[0] <= need.limit_bytes
        why = awake if fits else f"the phases of this recipe let no memory sleep; {awake}"
        return SleepDecision(sets[0], f"nothing sleeps: {why}")
    rest = f". The largest phase then needs {as_size(peaks[chosen])}"
    cost = f", and a step copies {as_size(copied)} to the host and back" if copied else ""
    sentence = f"{as_words(sets[chosen])} in turn: {awake}{rest}{cost}"
    return SleepDecision(sets[chosen], sentence, copied, _host_problem(model, sets[chosen], need))


def sleep_levels(model: MemoryModel) -> list[dict[str, Tags]]:
    """Return sets of tags that could sleep, by rising cost: none first, then all that may."""
    costs = {
        (role.name, item.tag): _cost(role, item)
        for role in model.sleepers()
        for item in model.memory[role.name]
        if item.kind in ("save", "drop") and model.sleep_phases(role, item.tag)
    }
    levels: list[dict[str, Tags]] = [{}]
    for most in sorted(set(costs.values())):
        level: dict[str, Tags] = {}
        for (name, tag), cost in costs.items():
            if cost <= most:
                level[name] = (*level.get(name, ()), tag)
        levels.append(level)
    return levels


def everything(model: MemoryModel) -> dict[str, Tags]:
    """Return all that may sleep."""
    return sleep_levels(model)[-1]


def copied_bytes(model: MemoryModel, sleeping: Sleeping) -> int:
    """Return what a rank copies in a step, to host memory and back, of tags that are saved.

    Bytes that no step changes are copied to the host once, and then only back.
    """
    total = 0
    for role in model.sleepers():
        for item in model.memory[role.name]:
            if item.kind == "save" and item.tag in sleeping.get(role.name, ()):
                asleep = model.sleep_phases(role, item.tag)
                times = _num_stretches(model.phases.names, asleep)
                total += times * item.num_bytes * (2 if item.changes else 1)
    return total


def effective_phases(model: MemoryModel, sleeping: Sleeping) -> Phases:
    """Return the recipe's phases, in which tags that do not sleep are awake everywhere."""
    awake: dict[str, dict[str, Tags]] = {}
    roles = {role.name: role for role in model.roles}
    for phase, declared in model.phases.awake.items():
        awake[phase] = dict(declared)
        for name in model.phases.roles & roles.keys():
            asleep = set(sleeping.get(name, ()))
            tags = roles[name].tags
            if not roles[name].is_counted and any(sleeping.values()):
                continue  # nobody knows what it takes, so it sleeps with the others
            if tags == ALL:
                kept: Tags = () if asleep else ALL
            else:
                there = {item.tag for item in model.memory[name]} - asleep
                kept = ALL if not asleep else tuple(tag for tag in tags if tag in there)
            named = dict.fromkeys((*declared.get(name, ()), *kept))
            if named:
                awake[phase][name] = ALL if set(ALL) & named.keys() else tuple(named)
    return Phases(awake)


def as_words(sleeping: Mapping[str, Tags]) -> str:
    """Return which roles give back which tags: "infer sleeps (kv, weights)"."""
    parts = [
        f"{name} sleeps ({', '.join(tag for tag in tags if tag != 'step')})"
        for name, tags in sleeping.items()
    ]
    return " and ".join(parts)


def _cost(role: PlannedRole, item: TagBytes) -> int:
    """Return the place of a tag in the order in which they go to sleep.

    A role that sleeps as a whole goes last, as if all of it was copied.
    """
    if role.tags == ALL:
        return 4
    if item.kind == "drop":
        return 0 if item.tag in PAGES else 1
    if not item.changes:
        return 2
    return 3 if item.tag == "moments" else 4


def _host_problem(model: MemoryModel, sleeping: Sleeping, need: Need) -> str:
    """Return why a host cannot keep what sleeps, in a sentence; "" where it can."""
    kept = model.ledgers(sleeping).most(Ledger.host_bytes)
    if need.host_bytes is None or kept <= need.host_bytes:
        return ""
    return (
        f"the GPU has room only if {as_words(sleeping)}, which keeps {as_size(kept)} in host "
        f"memory, and a rank may keep {as_size(need.host_bytes)} there: use more ranks, or give "
        "the job more host memory"
    )


def _peak(model: MemoryModel, sleeping: Sleeping, kv_bytes: int) -> int:
    return model.ledgers(sleeping).kv_sized(kv_bytes).most(Ledger.peak_bytes)


def _num_stretches(names: tuple[str, ...], asleep: tuple[str, ...]) -> int:
    """Return how often a tag wakes in a step, whose phases come one after the other, again and
    again.
    """
    return sum(
        name not in asleep and names[index - 1] in asleep for index, name in enumerate(names)
    )
