"""Losses of algorithms by hand: loops over Python floats, which share no code with the package.

`hand_loss` computes the loss of whole answers for given log-probs. Its gradient is taken by central
differences. What an algorithm treats as a constant comes from the answers themselves.
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Any

import numpy as np

from tests.unit.algo.cases import Answer

PerToken = list[list[float]]

DEFAULTS: dict[str, Any] = {
    "surrogate": "ppo",
    "low": 0.2,
    "high": 0.2,
    "dual": None,
    "aggregation": "token",
    "advantage": "grpo",
    "kl": None,
    "kl_coef": 0.0,
    "kl_unbiased": False,
    "kl_reward": 0.0,
    "entropy": 0.0,
    "opsm": None,
    "weight": None,
    "mean_one": False,
    "reject": None,
    "veto": None,
    "discount": 1.0,
    "lambda": 1.0,
    "behaviour": "old",
    "max_tokens": 10,
    "mask_truncated": False,
}


def hand_loss(answers: list[Answer], logprobs: PerToken, settings: dict[str, Any]) -> float:
    """Return the loss of all answers, whose log-probs are `logprobs`."""
    s = DEFAULTS | settings
    s["mean_weight"] = _mean_weight(answers, s) if s["mean_one"] else 1.0
    advantages = hand_advantages(answers, s)
    numbers = [
        [
            token_loss(answer, row, i, advantages[a][i], s) if answer.learned[i] else 0.0
            for i in range(answer.num_tokens)
        ]
        for a, (answer, row) in enumerate(zip(answers, logprobs, strict=True))
    ]
    if s["mask_truncated"]:
        numbers = [
            [0.0] * len(row) if answer.status == "truncated" else row
            for answer, row in zip(answers, numbers, strict=True)
        ]
    counts = [sum(answer.learned) for answer in answers]
    sums = [sum(row) for row in numbers]
    if s["aggregation"] == "token":
        return sum(sums) / sum(counts)
    if s["aggregation"] == "sample":
        return sum(total / count for total, count in zip(sums, counts, strict=True)) / len(answers)
    return sum(sums) / (len(answers) * s["max_tokens"])


def hand_gradient(
    answers: list[Answer], settings: dict[str, Any], step: float = 1e-6
) -> list[float]:
    """Return the derivative of the loss by the log-prob of each token."""
    gradient = []
    for a, answer in enumerate(answers):
        for i in range(answer.num_tokens):
            ends = []
            for sign in (1, -1):
                moved = [list(other.logprobs) for other in answers]
                moved[a][i] += sign * step
                ends.append(hand_loss(answers, moved, settings))
            gradient.append((ends[0] - ends[1]) / (2 * step))
    return gradient


def token_loss(
    answer: Answer, row: list[float], i: int, advantage: float, s: dict[str, Any]
) -> float:
    """Return the loss of one token."""
    behaviour = answer.old if s["behaviour"] == "old" else answer.rollout
    ratio = exp(row[i] - behaviour[i])
    if s["surrogate"] == "cispo":
        constant = exp(answer.logprobs[i] - behaviour[i])
        loss = -min(max(constant, 1 - s["low"]), 1 + s["high"]) * advantage * row[i]
    else:
        used = _whole_ratio(answer, row, behaviour) if s["surrogate"] == "gspo" else ratio
        bounded = min(max(used, 1 - s["low"]), 1 + s["high"])
        loss = max(-used * advantage, -bounded * advantage)
        if s["dual"] is not None and advantage < 0:
            loss = min(loss, -s["dual"] * advantage)
    if s["weight"] is not None:
        mode, level, low, high = s["weight"]
        loss *= _weight(_level_ratio(answer, i, level), mode, low, high) / s["mean_weight"]
    if s["opsm"] is not None and advantage < 0:
        falls = [
            before - now
            for before, now, learned in zip(behaviour, answer.logprobs, answer.learned, strict=True)
            if learned
        ]
        if sum(falls) / len(falls) > s["opsm"]:
            loss = 0.0
    if s["kl"] is not None:
        distance = row[i] - answer.reference[i]
        kl = {
            "k1": distance,
            "k2": distance * distance / 2,
            "k3": exp(-distance) - 1 + distance,
            "low_var": min(max(exp(-distance) - 1 + distance, -10.0), 10.0),
        }[s["kl"]]
        loss += s["kl_coef"] * kl * (ratio if s["kl_unbiased"] else 1.0)
    loss -= s["entropy"] * answer.entropy[i]
    if s["reject"] is not None:
        level, low, high = s["reject"]
        if not low <= _level_ratio(answer, i, level) <= high:
            return 0.0
    if s["veto"] is not None:
        learned = [j for j in range(answer.num_tokens) if answer.learned[j]]
        if min(_level_ratio(answer, j, "token") for j in learned) < s["veto"]:
            return 0.0
    return loss


def _whole_ratio(answer: Answer, row: list[float], behaviour: list[float]) -> float:
    logs = [
        now - before
        for now, before, learned in zip(row, behaviour, answer.learned, strict=True)
        if learned
    ]
    return exp(sum(logs) / len(logs))


def _level_ratio(answer: Answer, i: int, level: str) -> float:
    logs = [
        old - rollout
        for old, rollout, learned in zip(answer.old, answer.rollout, answer.learned, strict=True)
        if learned
    ]
    log = {
        "token": answer.old[i] - answer.rollout[i],
        "sequence": sum(logs),
        "geometric": sum(logs) / len(logs),
    }[level]
    return exp(min(max(log, -20.0), 20.0))


def _weight(ratio: float, mode: str, low: float, high: float) -> float:
    if mode == "truncate":
        return min(ratio, high)
    if mode == "clip":
        return min(max(ratio, low), high)
    return ratio if low <= ratio <= high else 0.0


def _mean_weight(answers: list[Answer], s: dict[str, Any]) -> float:
    mode, level, low, high = s["weight"]
    weights = [
        _weight(_level_ratio(answer, i, level), mode, low, high)
        for answer in answers
        for i in range(answer.num_tokens)
        if answer.learned[i]
    ]
    return sum(weights) / len(weights)


def hand_advantages(answers: list[Answer], s: dict[str, Any]) -> PerToken:
    """Return the advantage of each token."""
    kind = s["advantage"]
    if kind in ("reinforce_pp", "ppo"):
        return _whitened(answers, _token_returns(answers, s, kind == "ppo"))
    if kind == "turn_returns":
        return _turn_returns(answers, s["discount"])
    by_answer = _gdpo(answers, s) if kind == "gdpo" else _by_group(answers, kind, "reward", s)
    tokens = [
        [
            by_answer[a] - s["kl_reward"] * (answer.old[i] - answer.reference[i])
            for i in range(answer.num_tokens)
        ]
        for a, answer in enumerate(answers)
    ]
    return _whitened(answers, tokens) if kind == "baseline" else tokens


def _turn_returns(answers: list[Answer], discount: float) -> PerToken:
    """A turn is a run of learned tokens, and the reward is that of the last turn."""
    of_turns: list[list[tuple[list[int], float]]] = []
    for answer in answers:
        runs: list[list[int]] = []
        for i in range(answer.num_tokens):
            if answer.learned[i]:
                if runs and runs[-1][-1] == i - 1:
                    runs[-1].append(i)
                else:
                    runs.append([i])
        later = range(len(runs) - 1, -1, -1)
        of_turns.append(
            [(run, answer.reward * discount**k) for run, k in zip(runs, later, strict=True)]
        )
    rows = []
    for answer, turns in zip(answers, of_turns, strict=True):
        others = [
            value
            for other, its in zip(answers, of_turns, strict=True)
            if other.prompt == answer.prompt
            for _, value in its
        ]
        row = [0.0] * answer.num_tokens
        for run, value in turns:
            for i in run:
                row[i] = value - sum(others) / len(others)
        rows.append(row)
    return rows


def _by_group(answers: list[Answer], kind: str, part: str, s: dict[str, Any]) -> list[float]:
    found = []
    for answer in answers:
        rewards = [_reward(other, part, s) for other in answers if other.prompt == answer.prompt]
        mean, size = sum(rewards) / len(rewards), len(rewards)
        centred = _reward(answer, part, s) - mean
        if kind in ("grpo", "gdpo"):
            std = sqrt(sum((reward - mean) ** 2 for reward in rewards) / (size - 1))
            centred /= std + 1e-6
        found.append(centred * size / (size - 1) if kind == "rloo" else centred)
    return found


def _reward(answer: Answer, part: str, s: dict[str, Any]) -> float:
    reward = answer.parts[part] if part != "reward" else answer.reward
    if "overlong" in s:
        buffer, penalty = s["overlong"]
        allowed = s["max_tokens"] - buffer
        if (drawn := sum(answer.learned)) > allowed:
            reward -= penalty * min((drawn - allowed) / buffer, 1.0)
    return reward


def _gdpo(answers: list[Answer], s: dict[str, Any]) -> list[float]:
    total = [0.0] * len(answers)
    for part, weight in s["parts"].items():
        for a, value in enumerate(_by_group(answers, "gdpo", part, s)):
            total[a] += weight * value
    mean = sum(total) / len(total)
    std = sqrt(sum((value - mean) ** 2 for value in total) / (len(total) - 1))
    return [(value - mean) / (std + 1e-6) for value in total]


def _token_returns(answers: list[Answer], s: dict[str, Any], critic: bool) -> PerToken:
    """Return discounted returns, or with a critic GAE's advantages, of the learned tokens."""
    rows = []
    for answer in answers:
        learned = [i for i in range(answer.num_tokens) if answer.learned[i]]
        row = [0.0] * answer.num_tokens
        later, later_value = 0.0, 0.0
        for i in reversed(learned):
            reward = -s["kl_reward"] * (answer.old[i] - answer.reference[i])
            if i == learned[-1]:
                reward += answer.reward
            if critic:
                delta = reward + s["discount"] * later_value - answer.values[i]
                later = delta + s["discount"] * s["lambda"] * later
                later_value = answer.values[i]
            else:
                later = reward + s["discount"] * later
            row[i] = later
        rows.append(row)
    return rows


def _whitened(answers: list[Answer], rows: PerToken) -> PerToken:
    values = [
        value
        for answer, row in zip(answers, rows, strict=True)
        for value, learned in zip(row, answer.learned, strict=True)
        if learned
    ]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [[(value - mean) / sqrt(variance + 1e-8) for value in row] for row in rows]


def flat_logprobs(answers: list[Answer]) -> np.ndarray:
    return np.array([value for answer in answers for value in answer.logprobs])
