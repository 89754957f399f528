"""Samples of a step as JSON lines, from which a replay can train again, bit for bit.

A line is a sample. Its keys are the fields of `_SampleRow`; one that has its default is left out.
Log-probs and rewards are written with all their digits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import DataError
from spmd_rl.observe.jsonl import numbered_lines, parse_json
from spmd_rl.observe.request_times import TIMES
from spmd_rl.types.columns import split_at
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt, PromptColumns, question_of
from spmd_rl.types.samples import NO_VERSION, Sample, SampleColumns, SampleStatus


class _Column(msgspec.Struct):
    """A column of a sample: its bytes, in base64, and what they are. Shape: [R] or [R, K]."""

    dtype: str
    shape: list[int]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[Any]) -> _Column:
        return cls(values.dtype.str, list(values.shape), values.tobytes())

    def array(self) -> NDArray[Any]:
        """Raises: ValueError, TypeError."""
        return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)


class _SampleRow(msgspec.Struct, omit_defaults=True):
    """One line of the file. The names of the fields are its keys.

    `prompt`, `answer`, `source`, `meta`, `prompt_tokens` and `question` are those of the prompt.
    `kept` is in base64. `mask` is there if it is not that of all tokens with a version. `columns`
    are those of the sample. `context` is there if it is not the prompt. `prompt_routes` are in
    base64.
    """

    prompt_uid: int
    index: int
    prompt: str
    answer: str
    text: str
    reward: float
    status: SampleStatus
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    parts: dict[str, float]
    prompt_tokens: list[int]
    temperature: float
    execution: int = -1
    kept: bytes = b""
    metadata: dict[str, Any] = {}
    source: str = ""
    meta: dict[str, Any] = {}
    mask: list[bool] | None = None
    question: str = ""
    columns: dict[str, _Column] = {}
    context: list[int] = []
    prompt_routes: bytes = b""


# what plain data may hold and JSON lacks is written as Python shows it
_encode_lines = msgspec.json.Encoder(enc_hook=repr).encode_lines


def samples_as_json_lines(groups: Sequence[Group]) -> str:
    """Return one line a sample of these groups, with the failed samples of a group at its end."""
    columns = Group.to_columns(groups)
    rows = _rows(columns.prompts, columns.samples, columns.lengths)
    if len(columns.failed.samples):
        rows += _rows(columns.prompts, columns.failed.samples, columns.failed.lengths)
        numbers = np.arange(len(columns))
        counts = columns.lengths, columns.failed.lengths
        order = np.concatenate([np.repeat(numbers, count) for count in counts])
        rows = [rows[i] for i in np.argsort(order, kind="stable").tolist()]
    return _json_lines(rows)


def read_groups(run: str | Path, step: int) -> list[Group]:
    """Return the groups that a run logged in a step, from its folder. The first step is 1.

    Raises: DataError for a file or line that is not there or not of samples.
    """
    path = Path(run) / "samples" / f"step_{step:05d}.jsonl"
    if not path.is_file():
        last = max((file.stem for file in path.parent.glob("step_*.jsonl")), default="")
        found = f"the last step with samples is {int(last[5:])}" if last else "no step has samples"
        raise DataError(str(path), f"there is no such file; {found}")
    rows = [_parsed(f"{path}:{number}", line) for number, line in numbered_lines(path)]
    return [_group([*own]) for _, own in groupby(rows, key=lambda row: row.prompt_uid)]


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
    return json.dumps(msgspec.to_builtins(rows[0], enc_hook=repr)) + "\n"


def _rows(
    prompts: PromptColumns, samples: SampleColumns, sizes: NDArray[np.int64]
) -> list[_SampleRow]:
    """Return a row for each sample, of which there are `sizes` to each prompt."""
    counts = sizes.tolist()
    columns_of_rows = (
        np.repeat(prompts.uid, counts).tolist(),
        samples.index.tolist(),
        _repeat(prompts.text, counts),
        _repeat(prompts.answer, counts),
        samples.text,
        samples.reward.tolist(),
        samples.status,
        split_at(samples.tokens.tolist(), samples.offsets),
        split_at(samples.logprobs.tolist(), samples.offsets),
        split_at(samples.versions.tolist(), samples.offsets),
        samples.parts,
        _repeat(split_at(prompts.tokens.tolist(), prompts.offsets), counts),
        samples.temperature.tolist(),
        samples.execution.tolist(),
        [sets.tobytes() for sets in samples.filled("kept")],
        [_without_times(metadata) for metadata in samples.filled("metadata")],
        _repeat(prompts.source, counts),
        _repeat(prompts.meta, counts),
    )
    rows = list(map(_SampleRow, *columns_of_rows))
    questions = _repeat(list(map(question_of, prompts.chat)), counts)
    for row, question in zip(rows, questions, strict=True):
        row.question = question
    _add_what_comes_before(rows, samples)
    if len(samples.mask):
        _add_masks(rows, samples)
    for name, values in samples.columns.items():
        for row, own in zip(rows, split_at(values, samples.offsets), strict=True):
            row.columns = row.columns | {name: _Column.of(own)}
    return rows


def _add_what_comes_before(rows: list[_SampleRow], samples: SampleColumns) -> None:
    """Write the samples' contexts, and the routes of these or of the prompts."""
    before = samples.filled("context"), samples.filled("prompt_routes")
    for row, context, routes in zip(rows, *before, strict=True):
        row.context, row.prompt_routes = context.tolist(), routes.tobytes()


def _without_times(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in each run with the same settings."""
    if TIMES not in metadata:
        return metadata
    return {key: value for key, value in metadata.items() if key != TIMES}


def _add_masks(rows: list[_SampleRow], samples: SampleColumns) -> None:
    """Write the masks that are not those of all tokens with a version."""
    is_own = samples.mask != samples.default("mask")
    masks = zip(
        *(split_at(values, samples.offsets) for values in (samples.mask, is_own)), strict=True
    )
    for row, (mask, differs) in zip(rows, masks, strict=True):
        if differs.any():
            row.mask = mask.tolist()


def _repeat(values: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    return list(chain.from_iterable(map(repeat, values, counts)))


def _parsed(where: str, line: bytes) -> _SampleRow:
    """Return a line as a row. Raises: DataError."""
    try:
        row = msgspec.convert(parse_json(where, line), _SampleRow)
    except msgspec.ValidationError as error:
        raise DataError(where, f"not the record of a sample: {error}") from None
    lengths = {len(row.tokens), len(row.logprobs), len(row.versions)}
    if row.mask is not None:
        lengths.add(len(row.mask))
    try:
        lengths |= {len(column.array()) for column in row.columns.values()}
    except (TypeError, ValueError) as error:
        raise DataError(where, f"not the record of a sample: its columns: {error}") from None
    if len(lengths) > 1:
        raise DataError(where, "not the record of a sample: its tokens lack log-probs or versions")
    return row


def _group(rows: list[_SampleRow]) -> Group:
    first, samples = rows[0], [_sample(row) for row in rows]
    prompt = Prompt(
        first.prompt_uid,
        np.array(first.prompt_tokens, np.int32),
        first.prompt,
        first.answer,
        first.source,
        first.meta,
    )
    return Group(
        prompt,
        [sample for sample in samples if sample.status != "failed"],
        [sample for sample in samples if sample.status == "failed"],
    )


def _sample(row: _SampleRow) -> Sample:
    versions = np.array(row.versions, np.int32)
    return Sample(
        prompt_uid=row.prompt_uid,
        index=row.index,
        tokens=np.array(row.tokens, np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=versions,
        status=row.status,
        temperature=row.temperature,
        text=row.text,
        reward=row.reward,
        parts=row.parts,
        execution=row.execution,
        kept=row.kept,
        mask=versions != NO_VERSION if row.mask is None else np.array(row.mask, np.bool_),
        metadata=row.metadata,
        columns={name: column.array() for name, column in row.columns.items()},
        context=np.array(row.context, np.int32),
        prompt_routes=row.prompt_routes,
    )
