"""What one call of the rollout asks for: groups, answered once all are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from spmd_rl.controller.deferred import Deferred
from spmd_rl.rollout.open_group import OpenGroup
from spmd_rl.rollout.request_flow import RequestFlow
from spmd_rl.types.groups import Group
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

T = TypeVar("T")


@dataclass(frozen=True)
class GroupRequest:
    """The samples of one prompt that a call asks for."""

    prompt: Prompt
    first_index: int = 0
    partial: Sequence[Sample] = ()
    round_tokens: int = 0


class GroupCall(Generic[T]):
    """The groups of one call: answered once all are there."""

    def __init__(
        self, flow: RequestFlow, num_groups: int, value_of: Callable[[list[Group]], T]
    ) -> None:
        self.answer = Deferred[T](self._abort)
        self.opened: dict[int, OpenGroup] = {}
        self._flow = flow
        self._num_groups = num_groups
        self._value_of = value_of
        self._groups: dict[int, Group] = {}
        self._has_begun = False

    def on_done(self, number: int, group: Group) -> None:
        self._groups[number] = group
        if self._has_begun:
            self.answer_if_whole()

    def answer_if_whole(self) -> None:
        """Answer if all groups are there. Called once they have all begun, and as they end."""
        self._has_begun = True
        if len(self._groups) == self._num_groups:
            self.answer.resolve(
                self._value_of([self._groups[number] for number in range(self._num_groups)])
            )

    def abort_all(self) -> None:
        """End the groups that are not whole, and keep what there is of them."""
        for number, group in self.opened.items():
            if number not in self._groups:
                self._groups[number] = self._flow.abort(group)

    def _abort(self) -> None:
        self.abort_all()
        self.answer_if_whole()
