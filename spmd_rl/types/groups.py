"""Groups: all samples of one prompt. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import ContractError
from spmd_rl.types.columns import Columns, consecutive_rows, split_at
from spmd_rl.types.prompts import Prompt, PromptColumns, construct
from spmd_rl.types.samples import Sample, SampleColumns

_Row = tuple["GroupColumns", int]  # columns and a row of them


@dataclass(frozen=True)
class Group:
    """All samples of one prompt, in the order of their index.

    `failed` holds the samples of status "failed", from which nothing is learned. `reward_time_s` is
    how long the reward functions took for this group. A group from another process is only a row of
    columns at first. Its fields are made when one of them is first read.
    """

    prompt: Prompt
    samples: list[Sample]
    failed: list[Sample] = field(default_factory=list)
    reward_time_s: float = 0.0

    if TYPE_CHECKING:
        _row: ClassVar[_Row | None]  # while the fields are not made
        # once they are: the row, and the samples and failed ones that were made from it
        _source: ClassVar[tuple[_Row, list[Sample], list[Sample]] | None]
    else:
        _row = _source = (
            None  # with annotations they would be fields, which cross between processes
        )

        def __getattr__(self, name: str) -> Any:
            if self._row is None:
                raise AttributeError(f"a Group has no {name}")
            columns, number = row = self.__dict__.pop("_row")
            prompt, samples, failed, reward_time_s = columns.groups[number]
            self.__dict__.update(
                prompt=prompt,
                samples=samples.copy(),
                failed=failed.copy(),
                reward_time_s=reward_time_s,
                _source=(row, samples, failed),
            )
            return getattr(self, name)

    @property
    def num_samples(self) -> int:
        return len(self.samples) if self._row is None else int(self._row[0].lengths[self._row[1]])

    @property
    def rewards(self) -> NDArray[np.float64]:
        if self._row is None:
            return np.array([sample.reward for sample in self.samples], np.float64)
        columns, number = self._row
        return columns.samples.reward[columns.offsets[number] : columns.offsets[number + 1]].copy()

    @staticmethod
    def to_columns(groups: Sequence[Group]) -> GroupColumns:
        """Return the columns of groups, in which they cross between processes and are computed on.

        Groups that came in columns, and were not changed since, keep those columns.
        Raises: ContractError when the arrays of a sample differ in length.
        """
        rows = [row for group in groups if (row := group._row or group._unchanged_row())]
        if not groups or len(rows) < len(groups):
            return _new_columns(groups)
        runs = consecutive_rows(rows)
        joined = GroupColumns.join([columns[start:stop] for columns, start, stop in runs])
        if len(runs) > 1:  # the next call need not join them again
            for number, group in enumerate(groups):
                if group._row:
                    group.__dict__["_row"] = (joined, number)
        return joined

    def _unchanged_row(self) -> _Row | None:
        """Return the row that the fields were made from, if the samples are still the same."""
        if self._source is None:
            return None
        row, samples, failed = self._source
        if len(samples) != len(self.samples) or len(failed) != len(self.failed):
            return None
        return row if all(map(is_, samples + failed, self.samples + self.failed)) else None


def _new_columns(groups: Sequence[Group]) -> GroupColumns:
    """Return columns made from the fields of the groups."""
    return GroupColumns(
        lengths=np.array([len(group.samples) for group in groups], np.int64),
        prompts=Prompt.to_columns([group.prompt for group in groups]),
        samples=Sample.to_columns([sample for group in groups for sample in group.samples]),
        failed=FailedColumns(
            lengths=np.array([len(group.failed) for group in groups], np.int64),
            samples=Sample.to_columns([sample for group in groups for sample in group.failed]),
        ),
        reward_time_s=np.array([group.reward_time_s for group in groups], np.float64),
    )


@dataclass(frozen=True)
class FailedColumns(Columns):
    """The failed samples of each group; `lengths` counts samples."""

    RAGGED = ("samples",)

    samples: SampleColumns


@dataclass(frozen=True)
class GroupColumns(Columns):
    """Groups in columns; `lengths` counts samples."""

    RAGGED = ("samples",)

    prompts: PromptColumns
    samples: SampleColumns
    failed: FailedColumns
    reward_time_s: NDArray[np.float64]

    @cached_property
    def of_sample(self) -> NDArray[np.int64]:
        """The number of each sample's group. Shape: [N]."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def rows(self) -> list[Group]:
        """Return groups that read these columns. Raises: ContractError when the columns differ
        in length.
        """
        try:
            for columns in (self, self.prompts, self.samples, self.failed, self.failed.samples):
                columns.check()
        except ValueError as error:
            raise ContractError(f"the columns of groups do not fit each other: {error}") from error
        return [construct(Group, {"_row": (self, number)}) for number in range(len(self))]

    @cached_property
    def groups(self) -> list[tuple[Prompt, list[Sample], list[Sample], float]]:
        """The fields of every group, made when a field of any group is first read."""
        samples = split_at(self.samples.rows(), self.offsets)
        failed = split_at(self.failed.samples.rows(), self.failed.offsets)
        times = self.reward_time_s.tolist()
        return list(zip(self.prompts.rows(), samples, failed, times, strict=True))
