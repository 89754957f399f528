"""Turns of episodes: their returns, and advantages of turns in place of whole samples. numpy only.

A turn is what the policy drew in one reply. An environment records its turns in the metadata of a
sample (`TURN_RECORDS`); without records, each run of learned tokens is a turn. What a sample's
reward has beyond the rewards of the turns is that of the last turn. The samples of one execution
and one agent are one line of turns, in the order of their index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import DataError
from spmd_rl.types.columns import offsets_of
from spmd_rl.types.groups import Group
from spmd_rl.types.samples import AGENT, TURN_RECORDS, Sample

EPSILON = 1e-6


@dataclass(frozen=True)
class SampleTurn:
    """One turn: the tokens of sample number `sample` of its group that it drew, and its return.

    `state` names the state of the world in which it began; "" if that is not known. The return is
    that of the turn and all later ones, discounted.
    """

    sample: int
    tokens: slice
    state: str
    returns: float


# from the turns of one agent in one group to their advantages, in the same order
TurnAdvantage = Callable[[list[SampleTurn]], NDArray[np.float64]]


def by_turn(
    groups: list[Group], advantage: TurnAdvantage, discount: float
) -> list[NDArray[np.float64]]:
    """Return the advantage of each turn on the tokens that it drew, and 0 on all others.

    Shape: an array a group, of all tokens of its samples end to end.
    Raises: DataError for records that do not fit a sample, and for a reward that is not finite.
    """
    made = []
    for group in groups:
        lengths = [len(sample.tokens) for sample in group.samples]
        offsets = offsets_of(np.array(lengths, np.int64))
        values = np.zeros(offsets[-1])
        for turns in _turns_by_agent(group, discount).values():
            for turn, value in zip(turns, advantage(turns), strict=True):
                own = values[offsets[turn.sample] : offsets[turn.sample + 1]]
                own[turn.tokens] = value
        made.append(values)
    return made


def less_mean_return(turns: list[SampleTurn]) -> NDArray[np.float64]:
    """Return each turn's return less the mean of all of them.

    There is one baseline for all turns. One for each place in the episode would depend on how many
    episodes came so far, and so favour longer ones. Equal returns give exactly 0.
    """
    returns = np.array([turn.returns for turn in turns])
    centred: NDArray[np.float64] = returns - returns.mean()
    return centred if (returns != returns[0]).any() else np.zeros_like(returns)


def among_equal_states(turns: list[SampleTurn]) -> NDArray[np.float64]:
    """Return each turn's return, less the mean of the turns that began in the same state, over
    their deviation plus 1e-6. A turn whose state no other shares, or is not known, has 0.

    Source: Feng et al. 2025, "Group-in-Group Policy Optimization".
    """
    of_state: dict[str, list[int]] = {}
    for number, turn in enumerate(turns):
        if turn.state:
            of_state.setdefault(turn.state, []).append(number)
    values = np.zeros(len(turns))
    for numbers in of_state.values():
        returns = np.array([turns[number].returns for number in numbers])
        if (returns != returns[0]).any():
            centred = returns - returns.mean()
            values[numbers] = centred / (returns.std(ddof=1) + EPSILON)
    return values


def _turns_by_agent(group: Group, discount: float) -> dict[str, list[SampleTurn]]:
    """Return the turns of each agent, in all executions."""
    lines: dict[tuple[str, int], list[int]] = {}
    for number, sample in enumerate(group.samples):
        execution = sample.execution if sample.execution >= 0 else -1 - number
        key = str(sample.metadata.get(AGENT, "")), execution
        lines.setdefault(key, []).append(number)
    turns: dict[str, list[SampleTurn]] = {}
    for (agent, _), numbers in lines.items():
        turns.setdefault(agent, []).extend(_with_returns(group, numbers, discount))
    return turns


def _with_returns(group: Group, numbers: list[int], discount: float) -> list[SampleTurn]:
    """Return the turns of the samples of one agent in one execution."""
    recorded = [
        (number, record)
        for number in numbers
        for record in _records(group.samples[number], group.prompt.uid)
    ]
    if not recorded:
        return []
    reward = group.samples[numbers[0]].reward
    rewards = [float(record["reward"]) for _, record in recorded]
    if not np.isfinite([reward, *rewards]).all():
        where = f"prompt {group.prompt.uid}, sample {group.samples[numbers[0]].index}"
        raise DataError(where, "the rewards of an episode must be finite numbers")
    rewards[-1] += reward - sum(rewards)
    returns, later = [], 0.0
    for of_turn in reversed(rewards):
        later = of_turn + discount * later
        returns.append(later)
    return [
        SampleTurn(number, _tokens_of(record), str(record["state"]), value)
        for (number, record), value in zip(recorded, reversed(returns), strict=True)
    ]


def _tokens_of(record: dict[str, Any]) -> slice:
    first = int(record["first_token"])
    return slice(first, first + int(record["num_tokens"]))


def _records(sample: Sample, uid: int) -> list[dict[str, Any]]:
    """Return the records of a sample's turns. Raises: DataError for those that do not fit it."""
    records = sample.metadata.get(TURN_RECORDS)
    if records is None:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.mask, [0]])))
        return [
            {"state": "", "reward": 0.0, "first_token": start, "num_tokens": end - start}
            for start, end in edges.reshape(-1, 2).tolist()
        ]
    try:
        places = [_tokens_of(record) for record in records]
        fit = all(0 <= one.start <= one.stop <= len(sample.tokens) for one in places)
        _ = [(float(record["reward"]), record["state"]) for record in records]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"prompt {uid}, sample {sample.index}", f"its turns: {error!r}") from error
    if not fit:
        raise DataError(f"prompt {uid}, sample {sample.index}", "its turns lie outside its tokens")
    return list(records)
