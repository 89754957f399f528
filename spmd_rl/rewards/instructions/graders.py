"""IFEval and IFBench: whether a response follows every instruction that its record lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from spmd_rl.rewards.answers.final_text import final_text
from spmd_rl.rewards.instructions import ifbench_checks, ifeval_checks
from spmd_rl.rewards.instructions.ifeval_checks import Check
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

INSTRUCTIONS, ARGUMENTS = "instruction_id_list", "kwargs"  # keys of the record, as published

_CHECKS = {"IFEval": ifeval_checks.CHECKS, "IFBench": ifbench_checks.CHECKS}
_TRIAL = "One sentence. Is it another one?\n\n* A third paragraph, with 3 words!"


def ifeval(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return 1 if the response follows all IFEval instructions of its record, as it stands.

    The parts are "strict" and "loose" for all of them together, and "strict_share" and
    "loose_share" for the share of them that are followed. Loose means that the response may also be
    read without its first line, its last line, or its asterisks.
    Raises: ValueError for an instruction that is not known or lacks an argument.
    """
    return _grade(prompt, sample, "IFEval")


def ifbench(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Return 1 if the response follows all IFBench instructions of its record, as `ifeval` does.

    Raises: ValueError for an instruction that is not known, needs a corpus or a trained model, or
    lacks an argument.
    """
    return _grade(prompt, sample, "IFBench")


def check_ifeval(prompt: Prompt) -> None:
    """Raise a ValueError for a record whose IFEval instructions cannot be checked."""
    _try(prompt, "IFEval")


def check_ifbench(prompt: Prompt) -> None:
    """Raise a ValueError for a record whose IFBench instructions cannot be checked."""
    _try(prompt, "IFBench")


def _try(prompt: Prompt, benchmark: str) -> None:
    """Check each instruction of a record on a text, so that a missing argument shows."""
    for is_followed in _instructions(prompt, benchmark):
        is_followed(_TRIAL)


def _grade(prompt: Prompt, sample: Sample, benchmark: str) -> dict[str, float]:
    instructions = _instructions(prompt, benchmark)
    text = final_text(prompt, sample).strip()
    forms = loose_forms(text)
    strict = [is_followed(text) for is_followed in instructions]
    loose = [any(map(is_followed, forms)) for is_followed in instructions]
    return {
        "reward": float(all(strict)),
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "strict_share": sum(strict) / len(strict),
        "loose_share": sum(loose) / len(loose),
    }


def unknown_instruction(name: str, benchmark: str) -> str:
    """Return a sentence that says why an instruction of a record is not checked."""
    if need := ifbench_checks.REFUSED.get(name):
        return f"the instruction {name!r} of this record is not checked: it needs {need}"
    return f"the instruction {name!r} of this record is none of those of {benchmark}"


def loose_forms(text: str) -> list[str]:
    """Return the forms of a response of which one has to follow an instruction loosely."""
    lines = text.split("\n")
    kept = [lines, lines[1:], lines[:-1], lines[1:-1]]
    forms = [text, *("\n".join(part).strip() for part in kept[1:])]
    return [*forms, *(form.replace("*", "") for form in forms)]


def _is_followed(name: str, check: Check, given: Mapping[str, Any], text: str) -> bool:
    """Return whether a text follows an instruction. Raises: ValueError for wrong arguments."""
    if not text.strip():
        return False
    try:
        return check(text, given)
    except KeyError as error:
        raise ValueError(f"{ARGUMENTS!r} of this record lacks {error} for {name}") from error
    except (re.error, TypeError, AttributeError) as error:
        problem = f"{ARGUMENTS!r} of this record are wrong for {name}: {error}"
        raise ValueError(problem) from error


def _instructions(prompt: Prompt, benchmark: str) -> list[Callable[[str], bool]]:
    """Return the checks of a record's instructions. Arguments that are null are left out."""
    checks = _CHECKS[benchmark]
    names, arguments = prompt.meta.get(INSTRUCTIONS), prompt.meta.get(ARGUMENTS)
    if not isinstance(names, list) or not names:
        raise ValueError(f"this record has no list {INSTRUCTIONS!r}")
    if unknown := [name for name in names if name not in checks]:
        raise ValueError(unknown_instruction(unknown[0], benchmark))
    if not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError(f"this record has no list {ARGUMENTS!r} as long as {INSTRUCTIONS!r}")
    given = [
        {key: value for key, value in (one or {}).items() if value is not None} for one in arguments
    ]
    named = zip(names, given, strict=True)
    return [partial(_is_followed, name, checks[name], own) for name, own in named]
