"""Reward functions that are shipped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spmd_rl.rewards.answers import match
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
        ("1,0001", 1),
        ("It is .5", 0.5),
        ("-.5", -0.5),
        ("x=.25", 0.25),
        (".5e1", 5),
        ("version 1.2.5", 5),
        ("it is...5", 5),
        ("1,2345", 2345),
        ("5.", 5),
        ("1,234,5678", 5678),
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


def test_numbers_beyond_floats_are_compared() -> None:
    asked = replace(PROMPT, answer="1e400")
    assert match.last_number(asked, sample("1" + "0" * 400)) == 1
    assert match.last_number(asked, sample("1e401")) == 0
    assert match.last_number(replace(PROMPT, answer=str(2**53)), sample(str(2**53 + 1))) == 0
    assert match.last_number(asked, sample("1e99999999999999999999")) == 0
