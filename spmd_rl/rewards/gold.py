"""Whether the shipped graders can work with a record: its answer, tests or instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spmd_rl.rewards.answers import dapo, deepscaler, math, multiple_choice, squad
from spmd_rl.rewards.code import code_tests
from spmd_rl.rewards.instructions import graders
from spmd_rl.rewards.names import BOXED
from spmd_rl.types.prompts import Prompt

# functions that raise ValueError or DataError, by the names of graders without "boxed_"
CHECKS: dict[str, Callable[[Prompt], object]] = {
    "math": math.check_answer,
    "dapo": dapo.check_answer,
    "deepscaler": deepscaler.check_answer,
    "multiple_choice": multiple_choice.check_answer,
    "exact_match": squad.check_answers,
    "f1": squad.check_answers,
    "ifeval": graders.check_ifeval,
    "ifbench": graders.check_ifbench,
    "code": code_tests.read_tests,
}


def check_prompt(prompt: Prompt, names: Iterable[str]) -> None:
    """Check that graders, by their canonical names, can grade the samples of a prompt.

    Functions of the user, and graders that take any answer, have no check.
    Raises: ValueError or DataError, which says what is wrong with the record.
    """
    for name in names:
        if check := CHECKS.get(name.removeprefix(BOXED)):
            check(prompt)
