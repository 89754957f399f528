"""Reward functions that are shipped, and errors that quote the sample."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from spmd_rl.rewards.grade import Grader

from spmd_rl.errors import DataError
from spmd_rl.rewards import grade, match
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

PROMPT = Prompt(7, np.array([1], np.int32), text="37+48=", answer="85")


def sample(text: str, status: Any = "completed") -> Sample:
    num = len(text)
    return Sample(
        7,
        3,
        np.zeros(num, np.int32),
        np.zeros(num, np.float32),
        np.zeros(num, np.int32),
        status,
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "exact", "contains", "last_number"),
    [
        ("85", 1, 1, 1),
        (" 85\n", 1, 1, 1),
        ("It is 85.", 0, 1, 1),
        ("85 or 86", 0, 1, 0),
        ("850", 0, 1, 0),
        ("", 0, 0, 0),
    ],
)
def test_match(text: str, exact: float, contains: float, last_number: float) -> None:
    got = (
        match.exact(PROMPT, sample(text)),
        match.contains(PROMPT, sample(text)),
        match.last_number(PROMPT, sample(text)),
    )
    assert got == (exact, contains, last_number)


def test_an_answer_that_was_cut_is_not_exact() -> None:
    assert match.exact(PROMPT, sample("85", "truncated")) == 0


@pytest.mark.parametrize(
    ("said", "number"),
    [
        ("1,000", 1000),
        ("1,234,567.5 in all", 1234567.5),
        ("2.50", 2.5),
        ("= -3", -3),
        ("-3", -3),
        ("(-3)", -3),
        ("options 1,2", 2),
        ("1, 2", 2),
        ("1,0000", 0),
        ("\u22125", -5),
        ("x = \u22121,250", -1250),
        ("1e5", 1e5),
        ("1.5E+3", 1500),
        ("2e-3", 0.002),
        ("2e\u22123", 0.002),
        ("5 eggs", 5),
        ("5eggs", 5),
        ("2024-12", 12),
        ("7\u22122", 2),
        ("COVID-19", 19),
        ("5 - 3", 3),
        ("The answer is 85.", 85),
    ],
)
def test_last_number_compares_numbers(said: str, number: float) -> None:
    asked = replace(PROMPT, answer=repr(number))
    assert match.last_number(asked, sample(said)) == 1
    assert match.last_number(asked, sample(f"{said} or 77")) == 0


def test_grade_takes_numbers_and_dicts() -> None:
    assert Grader(lambda p, s: True).grade(PROMPT, sample("x")).reward == 1.0
    graded = Grader(lambda p, s: {"reward": 0.5, "form": 1}).grade(PROMPT, sample("x"))
    assert (graded.reward, graded.parts) == (0.5, {"reward": 0.5, "form": 1.0})


def test_a_reward_may_leave_its_directory(tmp_path: Path) -> None:
    here = Path.cwd()
    with Grader(lambda p, s: os.chdir(tmp_path) or 1.0) as grader:
        grader.grade(PROMPT, sample("x"))
    assert Path.cwd() == here


@pytest.mark.parametrize("ends", [lambda: 1.0, lambda: 1 / 0])
def test_a_judge_leaves_torch_as_it_was(ends: Any) -> None:
    """Else the next tokens and the next gradient would be computed by its switches."""

    def judge(prompt: Prompt, sample: Sample) -> float:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return ends()

    with suppress(DataError):
        Grader(judge).grade(PROMPT, sample("x"))
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)


def _raises(prompt: Prompt, sample: Sample) -> float:
    raise KeyError("gold")


class _Silent(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


def _raises_silently(prompt: Prompt, sample: Sample) -> float:
    raise _Silent


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (_raises, "raised KeyError: 'gold'"),
        (_raises, "(at test_rewards.py:"),
        (lambda p, s: None, "returned no finite number as 'reward': None"),
        (lambda p, s: math.nan, "returned no finite number as 'reward': nan"),
        (lambda p, s: "1", "returned no finite number as 'reward': '1'"),
        (lambda p, s: b"1", "returned no finite number as 'reward': b'1'"),
        (lambda p, s: {"reward": "0.5"}, "returned no finite number as 'reward': '0.5'"),
        (
            lambda p, s: {"reward": 1, "mean": 2},
            "a value called 'mean', but reward/mean is a metric",
        ),
        (lambda p, s: {"reward": 1, "failed_samples": 2}, "a value called 'failed_samples'"),
        (lambda p, s: {"form": 1.0}, "without the key 'reward'"),
        (lambda p, s: {"reward": 1.0, "form": "good"}, "as 'form': 'good'"),
        (lambda p, s: {"reward": 1.0, 3: "good"}, "as '3': 'good'"),
        (lambda p, s: 10**400, "returned no finite number as 'reward': 1000"),
        (lambda p, s: sys.exit(0), "raised SystemExit: 0"),
        (lambda p, s: _Silent(), "returned no finite number as 'reward': a _Silent"),
        (_raises_silently, "raised _Silent: a _Silent"),
        (lambda p, s: p.tokens.fill(0), "raised ValueError: assignment destination is read-only"),
        (lambda p, s: s.tokens.sort(), "raised ValueError: sort array is read-only"),
        (
            lambda p, s: np.negative(s.logprobs, out=s.logprobs),
            "raised ValueError: output array is read-only",
        ),
        (
            lambda p, s: s.versions.__setitem__(0, 9),
            "raised ValueError: assignment destination is read-only",
        ),
    ],
)
def test_a_failing_reward_shows_the_sample(reward: Any, problem: str) -> None:
    with pytest.raises(
        DataError, match=r"on prompt 7 sample 3 \(prompt '37\+48=', answer '85', response '84'\)"
    ) as told:
        Grader(reward).grade(PROMPT, sample("84"))
    assert problem in str(told.value)


@pytest.mark.parametrize("reward", [lambda p, s: "x" * 10**6, lambda p, s: {"form": "x" * 10**6}])
def test_not_all_of_a_long_value_is_shown(reward: Any) -> None:
    with pytest.raises(DataError) as told:
        Grader(reward).grade(PROMPT, sample("84"))
    assert "xxx..." in str(told.value)
    assert len(str(told.value)) < 1000


def _hangs(prompt: Prompt, sample: Sample) -> float:
    try:
        threading.Event().wait()
    except Exception:
        return 0.0
    return 1.0


def _computes_for_ever(prompt: Prompt, sample: Sample) -> float:
    return float(bool(re.match(r"(a|a)*b", "a" * 60)))


@pytest.mark.parametrize("reward", [_hangs, _computes_for_ever])
def test_a_reward_that_hangs_is_ended_and_shows_the_sample(reward: Any) -> None:
    with (
        Grader(reward, 0.1) as grader,
        pytest.raises(DataError, match=r"on prompt 7 sample 3 .*: took longer than 0\.1 s"),
    ):
        grader.grade(PROMPT, sample("84"))
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("seconds", [[600, 600, 600, 9000], [600, 9000, 600, 9000]])
def test_each_sample_has_the_whole_deadline(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float]
) -> None:
    """However long those before it took, and also after one that was ended. The clock and the alarm
    are the test's.
    """
    clock = [0.0]
    monkeypatch.setattr(grade, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def takes(prompt: Prompt, one: Sample) -> float:
        clock[0] += float(one.text)
        signal.raise_signal(signal.SIGALRM)
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 400, (
            "the alarm rings again when the sample is due"
        )
        return float(one.text)

    with Grader(takes, 1000.0) as grader:
        for one in seconds:
            with (
                pytest.raises(DataError, match="took longer than 1000 s")
                if one > 1000
                else nullcontext()
            ):
                assert grader.grade(PROMPT, sample(str(one))).reward == one
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_reward_with_an_alarm_of_its_own_leaves_the_next_sample_its_deadline() -> None:
    def reward(prompt: Prompt, one: Sample) -> float:
        if one.text == "own":
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            return 1.0
        return _hangs(prompt, one)

    with Grader(reward, 0.1) as grader:
        for _ in range(2):
            assert grader.grade(PROMPT, sample("own")).reward == 1.0
            with pytest.raises(DataError, match="took longer"):
                grader.grade(PROMPT, sample("84"))
