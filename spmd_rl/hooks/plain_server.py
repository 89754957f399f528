"""Server of plain reward functions: one call at a time, in order, each answered at once."""

from __future__ import annotations

import os
import time

from spmd_rl.hooks.loaded import LoadedHooks
from spmd_rl.hooks.messages import DAMAGED_EXIT, Calls, Problem, Result
from spmd_rl.hooks.process_state import ProcessState
from spmd_rl.hooks.rank_link import RankLink
from spmd_rl.hooks.reward_calls import RewardCall, calls_of, problem_of
from spmd_rl.hooks.running_note import RunningNote


def serve_plain(link: RankLink, note: RunningNote, state: ProcessState, hooks: LoadedHooks) -> None:
    """Serve calls until the rank ends."""
    while (message := link.receive()) is not None:
        if not isinstance(message, Calls):
            continue
        for call in calls_of(message, hooks):
            note.write(call.call_id)
            answer = _answer(call, state)
            try:
                state.restore()
                note.clear()  # the rank may take its time to read
                link.send(answer)
            except OSError:
                note.write(call.call_id)
                os._exit(DAMAGED_EXIT)
            if isinstance(answer, Problem) and answer.spoiled:
                os._exit(0)


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
