"""Limits of a replay: what of a run it does not look at, in words of the verdict's first line."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from spmd_rl.mesh.axes import MODEL
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.model.lora import LoraConfig

SPLIT_OF = {"engine": "infer", "trainer": "train", "megatron": "train"}  # roles among the sides


def limits_of(
    settings: dict[str, Any],
    sides: Collection[str],
    case: ReplayCase,
    lora: LoraConfig,
    on_ranks: Collection[str],
) -> list[str]:
    """Return what the run of these settings did with the samples, and `sides` leave out.

    Those in `on_ranks` are replayed on their ranks. The weights have the adapters of `lora`.
    """
    alone = [side for side in sides if side not in on_ranks]
    return [
        *_axes(settings, alone),
        *_other_programs(settings, sides),
        *_adapters(settings, lora),
        *_kept_sets(case),
        *_routes(settings),
    ]


def first_line(limits: Collection[str]) -> str:
    """Return the sentence that names what was not looked at."""
    return f"Not looked at, so faults there cannot be seen: {'; '.join(limits)}."


def _axes(settings: dict[str, Any], sides: Collection[str]) -> Iterator[str]:
    """Yield the axes along which ranks of a role shared the work that one rank replays."""
    for side in sides:
        split = settings.get("split", {}).get(SPLIT_OF.get(side), {})
        if shared := [f"{axis} {split[axis]}" for axis in MODEL if split.get(axis, 1) > 1]:
            yield f"exchanges of the {side}'s ranks, of which one replays all ({', '.join(shared)})"


def _other_programs(settings: dict[str, Any], sides: Collection[str]) -> Iterator[str]:
    """Yield the programs of the run in whose place our own roles compute."""
    if "engine" in sides and settings.get("engine", {}).get("kind") == "sglang":
        yield "SGLang, in whose place our engine computes"
    trainer = settings.get("trainer", {})
    if "trainer" in sides and trainer.get("backend", {}).get("kind") == "megatron":
        yield "Megatron-core, in whose place our trainer computes"


def _adapters(settings: dict[str, Any], lora: LoraConfig) -> Iterator[str]:
    if settings.get("trainer", {}).get("lora", {}).get("rank") and not lora.rank:
        yield "adapters of the run, as the folder of its weights has none"


def _kept_sets(case: ReplayCase) -> Iterator[str]:
    sampling = case.sequences[0].sampling
    if sampling.replays:
        names = ", ".join(sampling.truncation)
        yield f"kept sets of {names}, as both sides score over the whole vocabulary"


def _routes(settings: dict[str, Any]) -> Iterator[str]:
    if settings.get("sampling", {}).get("replay_routes"):
        yield "recorded routes of experts, as each side chooses its own"
