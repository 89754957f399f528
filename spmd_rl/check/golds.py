"""Check of what records give to graders: answers, choices, tests and instructions."""

from __future__ import annotations

from collections.abc import Iterable

from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.prompt_records import PromptConfig, graded_prompt, own_reward
from spmd_rl.errors import DataError
from spmd_rl.rewards.gold import check_prompt


def check_golds(
    records: Iterable[DataRecord], prompts: PromptConfig, rewards: Iterable[str]
) -> None:
    """Check that the shipped graders among `rewards` can grade each record, or those that it names.

    Names are canonical. Raises: DataError, which names file, line and what is wrong.
    """
    names = [*rewards]
    for number, record in enumerate(records):
        graders = [*own_reward(record, prompts)] or names
        prompt = graded_prompt(record, prompts, number)
        try:
            check_prompt(prompt, graders)
        except DataError as error:
            field = error.where.rpartition(": ")[2]
            problem = str(error).removeprefix(f"{error.where}: ")
            raise DataError(f"{record.where}: {field}", problem) from error
        except ValueError as error:
            raise DataError(record.where, str(error)) from error
