"""IFEval's rule: whether a response follows every instruction that its record lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spmd_rl.rewards.final_text import after_thinking
from spmd_rl.rewards.instructions import CHECKS
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

INSTRUCTIONS, ARGUMENTS = "instruction_id_list", "kwargs"  # keys of the record, as published


def ifeval(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return 1 if the response follows all instructions of its record, as it stands.

    The parts are "strict" and "loose" for all of them together, and "strict_share" and
    "loose_share" for the share of them that are followed. Loose means that the response may also be
    read without its first line, its last line, or its asterisks.
    Raises: ValueError for an instruction that is not known or lacks an argument.
    """
    instructions = _instructions(prompt)
    text = after_thinking(sample.text)
    text = "" if text.lstrip().startswith("<think>") else text.strip()
    strict = [_follows(text, name, given) for name, given in instructions]
    loose = [
        any(_follows(form, name, given) for form in loose_forms(text))
        for name, given in instructions
    ]
    return {
        "reward": float(all(strict)),
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "strict_share": sum(strict) / len(strict),
        "loose_share": sum(loose) / len(loose),
    }


def loose_forms(text: str) -> list[str]:
    """Return the forms of a response of which one has to follow an instruction loosely."""
    lines = text.split("\n")
    kept = [lines, lines[1:], lines[:-1], lines[1:-1]]
    forms = [text, *("\n".join(part).strip() for part in kept[1:])]
    return [*forms, *(form.replace("*", "") for form in forms)]


def _follows(text: str, name: str, given: Mapping[str, Any]) -> bool:
    if not text.strip():
        return False
    try:
        return CHECKS[name](text, given)
    except KeyError as error:
        raise ValueError(f"{ARGUMENTS!r} of this record lacks {error} for {name}") from error
    except (re.error, TypeError, AttributeError) as error:
        raise ValueError(f"{ARGUMENTS!r} of this record are wrong for {name}: {error}") from error


def _instructions(prompt: Prompt) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each instruction with its arguments, without those that are null."""
    names, arguments = prompt.meta.get(INSTRUCTIONS), prompt.meta.get(ARGUMENTS)
    if not isinstance(names, list) or not names:
        raise ValueError(f"this record has no list {INSTRUCTIONS!r}")
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"the instruction {unknown[0]!r} of this record is none of IFEval's")
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"this record has no list {ARGUMENTS!r} as long as {INSTRUCTIONS!r}")
    given = [
        {key: value for key, value in (one or {}).items() if value is not None} for one in arguments
    ]
    return list(zip(names, given, strict=True))
