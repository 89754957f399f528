"""Server of plain reward functions: one call at a time, in order, each answered at once."""

from __future__ import annotations

import os
import time

from msgspec.structs import replace

from spmd_rl.hooks.child.loaded import LoadedHooks
from spmd_rl.hooks.child.process_state import ProcessState
from spmd_rl.hooks.child.rank_link import RankLink
from spmd_rl.hooks.child.reward_calls import RewardCall, calls_of, problem_of
from spmd_rl.hooks.wire.answer_ring import AnswerRing
from spmd_rl.hooks.wire.messages import DAMAGED_EXIT, Answered, Calls, Problem, Result
from spmd_rl.hooks.wire.running_note import RunningNote

UNTOLD_S = 0.002  # how long answers may be in the ring before the rank is told


def serve_plain(link: RankLink, note: RunningNote, state: ProcessState, hooks: LoadedHooks) -> None:
    """Serve calls until the rank ends."""
    answers = _Answers(link, note.answers)
    while (message := link.receive()) is not None:
        if not isinstance(message, Calls):
            continue
        for call in calls_of(message, hooks):
            note.write(call.call_id)
            answer = _answer(call, state)
            try:
                state.restore()
                if isinstance(answer, Result) and state.is_worn:
                    answer = replace(answer, spoiled=True)
                note.clear()  # the rank may take its time to read
                answers.give(answer)
            except OSError:
                # who has closed what is known if no other call was answered meanwhile
                if not answers.are_untold:
                    note.write(call.call_id)
                os._exit(DAMAGED_EXIT)
            if answer.spoiled:
                os._exit(0)
        answers.tell()


class _Answers:
    """Answers to the rank: numbers go into the ring, and all else through the socket."""

    def __init__(self, link: RankLink, ring: AnswerRing) -> None:
        self._link, self._ring = link, ring
        self._told, self._told_s = 0, 0.0

    @property
    def are_untold(self) -> bool:
        """Whether the rank was not told of all answers in the ring."""
        return self._ring.count > self._told

    def give(self, answer: Result | Problem) -> None:
        """Answer a call. Blocks: until the socket takes what is sent."""
        if type(answer) is Result and not answer.metrics and len(answer.grades) == 1:
            (grade,) = answer.grades
            if not grade.parts and not answer.notes and not answer.spoiled:
                now_s = time.monotonic()
                if not self.are_untold:
                    self._told_s = now_s
                self._ring.add(answer.call_id, answer.seconds, grade.reward)
                if now_s - self._told_s > UNTOLD_S:
                    self.tell()
                return
        self.tell()
        self._link.send(answer)

    def tell(self) -> None:
        """Tell the rank of what is in the ring. Blocks: until the socket takes it."""
        if self.are_untold:
            self._link.send(Answered(self._ring.count))
            self._told = self._ring.count


def _answer(call: RewardCall, state: ProcessState) -> Result | Problem:
    """Call the function once."""
    began_s = time.monotonic()
    try:
        return call.answer(call.start(), time.monotonic() - began_s)
    # a user's function may raise anything
    except BaseException as error:  # noqa: BLE001
        problem = problem_of(error, call.reward.function)
        damaged = state.damaged
        return Problem(call.call_id, time.monotonic() - began_s, problem, damaged, damaged)
