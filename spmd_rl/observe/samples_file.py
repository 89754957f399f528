"""Samples of a step as JSON lines: prompt, response and reward, with tokens and log-probs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, repeat

import msgspec
import numpy as np

from spmd_rl.types.columns import split_at
from spmd_rl.types.samples import Group

_encode_lines = msgspec.json.Encoder().encode_lines


def samples_as_json_lines(groups: Sequence[Group]) -> str:
    """Return one line a sample of these groups."""
    return _json_lines(_sample_rows(groups))


class _SampleRow(msgspec.Struct, omit_defaults=True):
    """One line of the file. The names of the fields are its keys."""

    prompt_uid: int
    index: int
    prompt: str
    answer: str
    text: str
    reward: float
    status: str
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    parts: dict[str, float] = {}


def _json_lines(rows: list[_SampleRow]) -> str:
    """Return the rows as `json.dumps` writes them, one a line.

    msgspec is ten times as fast, but it writes NaN as null and refuses half of a surrogate pair.
    """
    try:
        lines = _encode_lines(rows)
    except UnicodeEncodeError:
        lines = b"null"
    if b"null" not in lines:
        return lines.decode()
    if len(rows) > 1:
        return "".join(_json_lines([row]) for row in rows)
    return json.dumps(msgspec.to_builtins(rows[0])) + "\n"


def _sample_rows(groups: Sequence[Group]) -> list[_SampleRow]:
    columns = Group.to_columns(groups)
    samples, prompts, sizes = columns.samples, columns.prompts, columns.lengths.tolist()
    columns_of_rows = (
        np.repeat(prompts.uid, sizes).tolist(),
        samples.index.tolist(),
        _repeat(prompts.text, sizes),
        _repeat(prompts.answer, sizes),
        samples.text,
        samples.reward.tolist(),
        samples.status,
        split_at(samples.tokens.tolist(), samples.offsets),
        split_at(samples.logprobs.tolist(), samples.offsets),
        split_at(samples.versions.tolist(), samples.offsets),
        samples.parts,
    )
    return list(map(_SampleRow, *columns_of_rows))


def _repeat(values: Sequence[str], counts: Sequence[int]) -> list[str]:
    return list(chain.from_iterable(map(repeat, values, counts)))
