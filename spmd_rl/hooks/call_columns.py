"""Columns of a message with calls: each prompt and each sample of it is in there once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.messages import Calls
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample


class CallRow(NamedTuple):
    """One call of the reward function number `function`."""

    call_id: int
    function: int
    prompt: Prompt
    samples: Sequence[Sample]
    info: CallInfo


def calls_message(rows: Iterable[CallRow]) -> Calls:
    """Return the message that asks for these calls."""
    prompts: dict[int, Prompt] = {}  # by the id of the object
    number_of_prompt: dict[int, int] = {}
    samples: list[Sample] = []
    first_of: dict[int, int] = {}  # where each sequence of samples begins, by its id
    ids, functions, infos, prompt_of, first, counts = [], [], [], [], [], []
    for call_id, function, prompt, run, info in rows:
        ids.append(call_id)
        functions.append(function)
        infos.append(info)
        key = id(prompt)
        if key not in prompts:
            number_of_prompt[key] = len(prompts)
            prompts[key] = prompt
        prompt_of.append(number_of_prompt[key])
        start = first_of.setdefault(id(run), len(samples))
        if start == len(samples):
            samples += run
        first.append(start)
        counts.append(len(run))
    columns = Prompt.to_columns(list(prompts.values())), Sample.to_columns(samples)
    return Calls(ids, functions, infos, prompt_of, first, counts, *columns)
