"""Columns of a message with calls: each prompt and each sample of it is in there once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.wire.messages import Calls, Episodes
from spmd_rl.types.prompts import Prompt, PromptColumns
from spmd_rl.types.samples import Sample

# One call: its id, the number of the reward function, and what that is called on.
CallRow = tuple[int, int, Prompt, Sequence[Sample], CallInfo]


class EpisodeRow(NamedTuple):
    """One call of `generate`, for what would be sample `sample_index` of `num_samples`."""

    call_id: int
    prompt: Prompt
    sample_index: int
    num_samples: int
    temperature: float
    info: CallInfo


class _Prompts:
    """Prompts in the order in which they are first needed."""

    def __init__(self) -> None:
        self._prompts: list[Prompt] = []
        self._numbers: dict[int, int] = {}  # by the id of the object

    def number(self, prompt: Prompt) -> int:
        number = self._numbers.setdefault(id(prompt), len(self._prompts))
        if number == len(self._prompts):
            self._prompts.append(prompt)
        return number

    def columns(self) -> PromptColumns:
        return Prompt.to_columns(self._prompts)


def calls_message(rows: Iterable[CallRow]) -> Calls:
    """Return the message that asks for these calls."""
    prompts, samples = _Prompts(), list[Sample]()
    begins: dict[int, int] = {}  # where each sequence of samples begins, by its id
    ids, functions, infos, prompt_of, first, counts = [], [], [], [], [], []
    for call_id, function, prompt, sequence, info in rows:
        ids.append(call_id)
        functions.append(function)
        infos.append(info)
        prompt_of.append(prompts.number(prompt))
        begin = begins.setdefault(id(sequence), len(samples))
        if begin == len(samples):
            samples += sequence
        first.append(begin)
        counts.append(len(sequence))
    columns = prompts.columns(), Sample.to_columns(samples)
    return Calls(ids, functions, infos, prompt_of, first, counts, *columns)


def episodes_message(rows: Iterable[EpisodeRow]) -> Episodes:
    """Return the message that asks for these episodes."""
    prompts, listed = _Prompts(), list(rows)
    return Episodes(
        [row.call_id for row in listed],
        [row.info for row in listed],
        [prompts.number(row.prompt) for row in listed],
        [row.sample_index for row in listed],
        [row.num_samples for row in listed],
        [row.temperature for row in listed],
        prompts.columns(),
    )
