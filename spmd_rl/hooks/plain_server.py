"""Server of plain reward functions: one call at a time, in order, each answered at once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spmd_rl.hooks.messages import DAMAGED_EXIT, Calls, Problem, Result
from spmd_rl.hooks.process_state import ProcessState
from spmd_rl.hooks.rank_link import RankLink
from spmd_rl.hooks.reward_calls import RewardCall, calls_of, problem_of
from spmd_rl.hooks.running_note import RunningNote
from spmd_rl.hooks.signatures import RewardFunction


def serve_plain(
    link: RankLink,
    note: RunningNote,
    state: ProcessState,
    rewards: Sequence[RewardFunction],
    config: Mapping[str, Any],
) -> None:
    """Serve calls until the rank ends."""
    while (message := link.receive()) is not None:
        if not isinstance(message, Calls):
            continue
        for call in calls_of(message, rewards, config):
            note.write(call.call_id)
            answer = _answer(call)
            try:
                state.restore()
                note.clear()  # the rank may take its time to read
                if isinstance(answer, Problem) and state.damaged:
                    link.send(msgspec.structs.replace(answer, in_doubt=True))
                    os._exit(0)
                link.send(answer)
            except OSError:
                note.write(call.call_id)
                os._exit(DAMAGED_EXIT)


def _answer(call: RewardCall) -> Result | Problem:
    """Call the function once."""
    began_s = time.monotonic()
    try:
        grades = call.grades(call.start())
    # a user's function may raise anything
    except BaseException as error:  # noqa: BLE001
        problem = problem_of(error, call.reward.function)
        return Problem(call.call_id, time.monotonic() - began_s, problem)
    return Result(call.call_id, time.monotonic() - began_s, grades, call.metrics)
