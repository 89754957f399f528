"""Whether the shipped graders can work with a record: its answer, tests or instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from spmd_rl.types.prompts import Prompt

# a function of a prompt that raises ValueError or DataError, by the names of graders
_CHECKS = {
    "math": "math:check_answer",
    "boxed_math": "math:check_answer",
    "deepscaler": "deepscaler:check_answer",
    "multiple_choice": "multiple_choice:check_answer",
    "boxed_multiple_choice": "multiple_choice:check_answer",
    "exact_match": "squad:check_answers",
    "boxed_exact_match": "squad:check_answers",
    "f1": "squad:check_answers",
    "boxed_f1": "squad:check_answers",
    "ifeval": "instructions:check_ifeval",
    "ifbench": "instructions:check_ifbench",
    "code": "code_tests:read_tests",
}


def check_prompt(prompt: Prompt, names: Iterable[str]) -> None:
    """Check that graders, by their canonical names, can grade the samples of a prompt.

    Functions of the user, and graders that take any answer, have no check.
    Raises: ValueError or DataError, which says what is wrong with the record.
    """
    for name in names:
        if name in _CHECKS:
            module, _, function = _CHECKS[name].partition(":")
            check: Callable[[Prompt], object] = getattr(
                import_module(f"spmd_rl.rewards.{module}"), function
            )
            check(prompt)
