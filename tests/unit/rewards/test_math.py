"""Mathematical answers, beside math-verify itself, and answers that would take minutes."""

from __future__ import annotations

import builtins
import random
from typing import Any

import math_verify
import pytest
import sympy

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.pool import HookPool
from spmd_rl.hooks.tasks import Failed, Graded, SampleTask
from spmd_rl.rewards.math import agrees, boxed_math, math, parse_answer
from spmd_rl.rewards.math_cost import is_costly
from spmd_rl.rewards.math_parse import MAX_ATTEMPTS, arithmetic, is_harmless, parse
from tests.unit.hooks.cases import events_of
from tests.unit.rewards.cases import ask, say


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("72", r"\boxed{72}", True),
        ("72", "The answer is 72.", True),
        ("72", "so $x = 72$", True),
        ("6 * 12 = 72\n#### 72", r"\boxed{72}", True),
        ("1,024", r"\boxed{1024}", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", True),
        ("1/2", "The answer is 2/4", True),
        ("50%", r"\boxed{50\%}", True),
        (r"$\frac{1}{2}$", r"\boxed{\dfrac12}", True),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
        ("(1,2)", r"\boxed{(1, 2)}", True),
        (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}", True),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        ("5", r"\boxed{x=5}", True),
        (r"\infty", r"\boxed{\infty}", True),
        ("3", r"<think>\boxed{4}</think>\boxed{3}", True),
        ("[0,1)", r"\boxed{[0,1)}", True),
        (r"\pi", r"\boxed{\pi}", True),
        ("2^{2024}", r"\boxed{2^{2024}}", True),
        ("10^{10^{10}}", r"\boxed{10^{10^{10}}}", True),
        ("72", r"\boxed{73}", False),
        ("72", "", False),
        ("72", "no idea", False),
        ("(1,2)", r"\boxed{(2,1)}", False),
        ("[0,1)", r"\boxed{(0,1]}", False),
        (r"x=5", r"\boxed{y=5}", False),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
        ("3", r"<think>\boxed{3}</think>\boxed{4}", False),
        ("x+1", r"\boxed{x-1}", False),
    ],
)
def test_math(answer: str, text: str, right: bool) -> None:
    assert math(ask(answer), say(text)) == right
    boxed = right and "boxed" in text
    assert boxed_math(ask(answer), say(text)) == boxed


@pytest.mark.parametrize(("answer", "problem"), [("", "is empty"), ("?!", "no mathematics")])
def test_an_answer_of_the_data_that_cannot_be_parsed_is_an_error(answer: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        math(ask(answer), say(r"\boxed{1}"))


_ATOMS = ["1", "2", "17", "-3", "0.5", "x", "1,000", r"\pi", r"\sqrt{2}", r"\frac{1}{3}", "n"]
_JOINS = [
    "{}+{}",
    "{} \\cdot {}",
    r"\frac{{{}}}{{{}}}",
    "({},{})",
    "{}-{}",
    "{{{}}}^{{{}}}",
    "{}={}",
]
_FRAMES = [
    r"so \boxed{{{}}}",
    "The answer is ${}$.",
    r"We get \[{}\]",
    "Final answer: {}",
    "{}",
    r"First $x$ and then \({}\) holds.",
    r"Final Answer: The final answer is ${}$. I hope it is correct.",
]


def _generated(number: int) -> tuple[str, str]:
    draw = random.Random(number)
    expression = draw.choice(_ATOMS)
    if draw.random() < 0.5:
        expression = draw.choice(_JOINS).format(expression, draw.choice(_ATOMS))
    if draw.random() < 0.15:
        numbers = [str(draw.randrange(1, 99)) for _ in range(3)]
        expression = "{}{}{}{}{}".format(
            numbers[0], draw.choice("+-*/^"), numbers[1], draw.choice("+-*/"), numbers[2]
        )
    return expression, draw.choice(_FRAMES).format(expression)


def test_a_thousand_texts_are_parsed_as_math_verify_does() -> None:
    """The one difference is plain arithmetic, which sympy would give to `eval`."""
    texts = {_generated(number)[1] for number in range(1000)}
    differ = []
    for text in sorted(texts):
        ours, theirs = parse(text), math_verify.parse(text, parsing_timeout=None)
        if [str(one) for one in ours] != [str(one) for one in theirs]:
            same = ours and theirs and math_verify.verify(theirs, ours, timeout_seconds=None)
            if not same:
                differ.append((text, ours, theirs))
    assert differ == []


def test_a_thousand_comparisons_are_those_of_math_verify() -> None:
    golds = [r"\boxed{17}", r"\boxed{x+1}", r"\boxed{\frac{1}{3}}", r"\boxed{(1,2)}", "$x=2$"]
    parsed_golds = {gold: math_verify.parse(gold, parsing_timeout=None) for gold in golds}
    found: list[tuple[bool, bool]] = []
    for number in range(200):
        text = _generated(number)[1]
        theirs = math_verify.parse(text, parsing_timeout=None)
        for gold, parsed in parsed_golds.items():
            verdict = math_verify.verify(parsed, theirs, timeout_seconds=None)
            found.append((agrees(gold, text), verdict))
    assert len(found) == 1000
    assert [pair for pair in found if pair[0] != pair[1]] == []
    assert any(pair[0] for pair in found)


def test_the_answer_of_the_data_comes_first() -> None:
    """An interval says what the inequality of the data says; the other way round is refused."""
    assert agrees("1<x<2", "$(1,2)$")
    assert not agrees("(1,2)", "$1<x<2$")


def test_no_text_reaches_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("eval was called")

    parse_answer.cache_clear()
    monkeypatch.setattr(builtins, "eval", refuse)
    for text in ("The answer is 1/2", r"\boxed{1/2}", "1 + 2 * 3", "answer: 2^3 ", "(1)/(2)"):
        assert parse(text)
    assert agrees("1/2", "The answer is 2/4")
    with pytest.raises(AssertionError, match="eval was called"):  # the control
        math_verify.parse("1 + 2 * 3", parsing_timeout=None, raise_on_error=True) or eval("1")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/2", "1/2"), ("2**3", "8"), ("1+2*3", "7"), ("-(4-6)", "2"), ("1.5*2", "3.0"), ("+7", "7")],
)
def test_arithmetic_has_the_value_of_its_text(text: str, value: str) -> None:
    assert sympy.simplify(arithmetic(text) - sympy.sympify(value)) == 0


@pytest.mark.parametrize(
    "text", ["007", "1+", "2(3)", "x+1", "f()", "", "'a'", "1 if 2 else 3", "~1"]
)
def test_what_is_no_arithmetic_is_none(text: str) -> None:
    assert arithmetic(text) is None


HOSTILE = {
    "tower": r"\boxed{10^{10^{10}}}",
    "plain tower": "The answer is 10^10^10",
    "exponential tower": r"\boxed{e^{e^{e^{e^{e}}}}}",
    "factorials": r"\boxed{((((9!)!)!)!)}",
    "large factorial": r"\boxed{100000000!}",
    "binomial": r"\boxed{\binom{100000000}{5000000}}",
    "divisor": r"\boxed{\gcd(10^{10^9}, 7)}",
    "open sum": r"\boxed{\sum_{i=1}^{10^{9}} \sin(i)^i}",
    "open integral": r"\boxed{\int_0^1 e^{x^x^x} dx}",
    "expanded power": r"\boxed{(x+y+z)^{5000}}",
    "matrix power": r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}^{100000000}}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 1000 + "1" + "}" * 1000 + "}",
    "brackets": r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
    "few brackets": r"\boxed{" + "(" * 60 + "1" + ")" * 60 + "}",
    "digits": "1" * 1_000_000,
    "boxed digits": r"\boxed{" + "7" * 1_000_000 + "}",
    "open boxes": r"\boxed{" * 20_000,
    "dollars": "$" * 100_000,
    "many formulas": "$\\frac{$ and " * 5_000,
    "many answers": "answer " * 50_000,
    "minus signs": "The answer is 1" + "-" * 3_000 + "1",
    "float": r"\boxed{9.9^{99999999}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_wrong(name: str) -> None:
    assert math(ask("5"), say(HOSTILE[name])) == 0
    assert boxed_math(ask("5"), say(HOSTILE[name])) == 0


def test_hostile_answers_cost_nothing_beside_their_own_sample() -> None:
    """Each stands between two good ones, in the pool that a run has."""
    texts = [text for hostile in HOSTILE.values() for text in (hostile, r"\boxed{5}")]
    with HookPool(HookConfig(deadline_s=60.0, processes=1), ["math"]) as pool:
        ids = [pool.submit(SampleTask(ask("5"), say(text), CallInfo())) for text in texts]
        events = events_of(pool)
    for hostile, good in zip(ids[::2], ids[1::2], strict=True):
        assert isinstance(events[hostile], Graded) and isinstance(events[good], Graded)
        assert events[hostile].grades["math"][0].reward == 0
        assert events[good].grades["math"][0].reward == 1


def test_what_still_takes_too_long_costs_its_own_sample() -> None:
    """No check sees how long these logarithms take; the deadline does."""
    long = "+".join(rf"\log(x^{k}+y)e^{{x+{k}y}}" for k in range(1, 150))
    tasks = [("5", r"\boxed{5}"), (f"{long}+1", rf"\boxed{{{long}}}"), ("6", r"\boxed{6}")]
    with HookPool(HookConfig(deadline_s=2.0, processes=1), ["math"]) as pool:
        ids = [
            pool.submit(SampleTask(ask(answer), say(text), CallInfo())) for answer, text in tasks
        ]
        events = events_of(pool)
    first, slow, last = [events[number] for number in ids]
    assert isinstance(slow, Failed) and "took longer than 2 s" in slow.error
    assert first.grades["math"][0].reward == last.grades["math"][0].reward == 1


def test_attempts_are_bounded() -> None:
    assert parse("$\\frac{$ " * (MAX_ATTEMPTS + 5)) is not None


@pytest.mark.parametrize(
    ("latex", "costly"),
    [
        (r"$2^{2024}$", False),
        (r"$\frac{1}{3}$", False),
        (r"$100!$", False),
        (r"$(x+1)^{10}$", False),
        (r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$", False),
        (r"$2^{100000}$", True),
        (r"$10000!$", True),
        (r"$(x+1)^{100}$", True),
        (r"$\sum_{i=1}^{3} i$", True),
        (r"$\int x dx$", True),
    ],
)
def test_what_is_costly(latex: str, costly: bool) -> None:
    assert is_costly(parse(latex)[0]) == costly


@pytest.mark.parametrize(
    ("latex", "harmless"),
    [
        (r"\gcd(4, 6)", True),
        (r"\binom{10}{3}", True),
        (r"\gcd(10^{9}, 7)", False),
        ("[0,1)" * 30, True),
        ("(" * 12 + ")" * 12, True),
        ("(" * 13, False),
        ("{" * 41, False),
    ],
)
def test_what_is_harmless(latex: str, harmless: bool) -> None:
    assert is_harmless(latex) == harmless
