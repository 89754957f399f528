"""Mathematical answers, beside math-verify itself, and answers that would take minutes."""

from __future__ import annotations

import builtins
import json
import random
from decimal import Decimal
from typing import Any

import math_verify
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import Graded, SampleTask
from spmd_rl.rewards.answers import math as math_module
from spmd_rl.rewards.answers.math import agrees, boxed_math, check_answer, math, parse_answer
from spmd_rl.rewards.answers.math_cost import MAX_SOLVED, is_costly, num_parts
from spmd_rl.rewards.answers.math_parse import MAX_ATTEMPTS, arithmetic, is_harmless, parse
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


SYMBOLS = {count: ",".join(f"x_{{{n}}}" for n in range(count)) for count in (40, 100, 300)}
LOGARITHMS = "+".join(rf"\log(x^{k}+y)e^{{x+{k}y}}" for k in range(1, 30))
NUMBERS = ",".join(map(str, range(700)))
COSTLY = {
    "symbols": ("5", rf"\{{{SYMBOLS[100]}\}}"),
    "symbols and a sum": ("x+1", rf"\{{{SYMBOLS[100]}\}}"),
    "more symbols": ("5", rf"\{{{SYMBOLS[300]}\}}"),
    "symbols and others": (rf"\{{{SYMBOLS[40]}\}}", rf"\{{{SYMBOLS[40].replace('x', 'y')}\}}"),
    "numbers": ("x+1", NUMBERS),
    "fewer numbers": (r"\{1,2\}", rf"\{{{NUMBERS[:900]}\}}"),
    "logarithms": (LOGARITHMS + "+1", LOGARITHMS),
    "unions": (r"\{1\}", r"\cup".join(rf"\{{x_{{{n}}}\}}" for n in range(20))),
    "logarithms of logarithms": ("5", r"\log(" * 11 + "x" + ")" * 11),
    "determinant": ("5", r"\det\begin{pmatrix}" + r"a&b&c&d&f&g\\" * 6 + r"\end{pmatrix}"),
    "equations": ("x=1", SYMBOLS[40].replace(",", "+") + "=1"),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_would_be_costly_is_bounded_by_its_work(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is a large difference simplified, nor are many symbols compared with each other."""
    sizes: list[int] = []
    verify = math_module._verifier()

    def noted(golds: list[Any], found: list[Any]) -> bool:
        sizes.append(num_parts(golds[0]) + num_parts(found[0]))
        return bool(verify(golds, found))

    monkeypatch.setattr(math_module, "_verifier", lambda: noted)
    answer, said = COSTLY[name]
    assert math(ask(answer), say(rf"\boxed{{{said}}}")) == 0
    assert max(sizes, default=0) <= MAX_SOLVED


def test_large_answers_that_are_right_are_found() -> None:
    backwards = ",".join(reversed(SYMBOLS[40].split(",")))
    assert agrees(rf"\{{{SYMBOLS[40]}\}}", rf"\boxed{{\{{{backwards}\}}}}")
    assert agrees(NUMBERS, rf"\boxed{{{NUMBERS}}}")
    assert agrees(SYMBOLS[40].replace(",", "+"), rf"\boxed{{{backwards.replace(',', '+')}}}")


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


NOTATIONS = [
    ("1e-05", r"\boxed{0.00001}", 1),
    ("1e-05", r"\boxed{10^{-5}}", 1),
    ("1e-05", "The answer is 1e-05.", 1),
    ("1e-05", "1e-5", 1),
    ("1e-05", r"\boxed{1\times 10^{-5}}", 1),
    ("1", "The answer is 1e-5", 0),
    ("1e+16", r"\boxed{10^{16}}", 1),
    ("1e+16", "10000000000000000", 1),
    ("1e+16", r"\boxed{10^{16}+1}", 0),
    ("1e-05", r"\boxed{0.00002}", 0),
    ("1e-07", r"\boxed{2e-07}", 0),
    ("1e-07", r"\boxed{0}", 0),
    ("0", r"\boxed{1e-09}", 0),
    (r"\$18.90", r"\boxed{18.90}", 1),
    (r"\$18.90", r"\boxed{\$18.90}", 1),
    (r"\$18.90", "It costs $18.90.", 1),
    (r"\$18.90", r"It costs \$18.90.", 1),
    ("18.9", r"\boxed{\$18.90}", 1),
    (r"\$32,\!348", r"\boxed{32348}", 1),
    (r"\$32,\!348", r"\boxed{32,348}", 1),
    (r"\$32,\!348", "The total is $32,348.", 1),
    ("$18.90", r"\boxed{18.90}", 1),
    ("$18.90", r"\boxed{18.91}", 0),
    ("-$5", r"\boxed{-5}", 1),
    ("$.50", r"\boxed{0.5}", 1),
    ("$5,000", "5000", 1),
    ("45°", r"\boxed{45°}", 1),
    ("45°", r"\boxed{45}", 1),
    ("45°", r"\boxed{45^\circ}", 1),
    (r"45^\circ", "The angle is 45°.", 1),
    ("45°", r"\boxed{46°}", 0),
    ("45°", r"\boxed{45\text{ degrees}}", 1),
    ("€5", r"\boxed{€5}", 1),
    ("€5", r"\boxed{5}", 1),
    ("€5.50", "It costs €5.50", 1),
    ("5", r"\boxed{€6}", 0),
    ("€18,90", r"\boxed{18.90}", 1),
    ("18,90 €", r"\boxed{18,90 €}", 1),
    ("1.234,56", r"\boxed{1234.56}", 1),
    (r"0.\overline{3}", r"\boxed{\frac{1}{3}}", 1),
    (r"0.\overline{3}", r"\boxed{0.\overline{3}}", 1),
    (r"0.\overline{3}", r"\boxed{0.3}", 0),
    (r"0.\overline{3}", r"$0.\overline{3}$", 1),
    (r"0.\overline{3}", r"The answer is 0.\overline{3}", 1),
    ("1/3", r"\boxed{0.(3)}", 1),
    (r"0.1\overline{6}", r"\boxed{1/6}", 1),
    (r"\frac13", r"\boxed{0.333...}", 1),
    ("6.63e-34", r"\boxed{1e-30}", 0),
    ("6.63e-34", r"\boxed{6.63 \times 10^{-34}}", 1),
    ("6.63e-34", "It is 6.63 × 10^-34.", 1),
    ("6.63e-34", r"\boxed{6.64\times10^{-34}}", 0),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", 0),
    (r"\frac{1}{2^{99}}", r"\boxed{2^{-99}}", 1),
    ("1/2^{99}", r"\boxed{1/2^{99}}", 1),
    ("e^{-200}", r"\boxed{e^{-300}}", 0),
    ("10^{-20}x", r"\boxed{2\cdot 10^{-20}x}", 0),
    ("10^{-20}x", r"\boxed{x\cdot 10^{-20}}", 1),
    ("(10^{-20},1)", r"\boxed{(10^{-30},1)}", 0),
    ("3", r"First \boxed{1}. Checking again, that is wrong: it is \boxed{3}.", 1),
    ("3", r"\boxed{1}, \boxed{3}", 1),
    ("1", r"\boxed{1}, \boxed{3}", 0),
    (r"\{1,3\}", r"\boxed{1} and \boxed{3}", 0),
    ("3", r"\boxed{3} wait, \boxed{4", 0),
    ("4", r"\boxed{4", 0),
    ("4", r"\boxed{3} wait, \boxed{4", 0),
    ("0.5", ".5", 1),
    ("0.5", r"\boxed{.5}", 1),
    ("5", r"\boxed{5.}", 1),
    ("5", "5.", 1),
    ("5.", r"\boxed{5}", 1),
    (".5", r"\boxed{1/2}", 1),
    ("50%", r"\boxed{50\%}", 1),
    ("50%", r"\boxed{0.5}", 1),
    ("50%", r"\boxed{50}", 1),
    ("50%", r"\boxed{0.5\%}", 0),
    (r"33.3\%", r"\boxed{33.3\%}", 1),
    ("0.333333", r"\boxed{1/3}", 1),
    ("1/3", r"\boxed{0.333333}", 1),
    ("1/3", r"\boxed{0.3333}", 0),
    ("3 1/2", r"\boxed{3.5}", 1),
    ("3½", r"\boxed{7/2}", 1),
    (r"3\frac12", r"\boxed{3 1/2}", 1),
    ("1 000 000", r"\boxed{10^6}", 1),
    ("32 348", r"\boxed{32348}", 1),
    (r"32\,348", r"\boxed{32{,}348}", 1),
    ("5 cm", r"\boxed{5}", 1),
    ("5 km/h", r"\boxed{5\text{ km/h}}", 1),
    ("5 m/s", r"\boxed{5}", 1),
    ("3m^2", r"\boxed{3}", 0),
    ("5 USD", r"\boxed{\$5}", 1),
    ("x=1e-7", r"\boxed{2e-7}", 0),
    ("6.022e23", r"\boxed{6.022\times 10^{23}}", 1),
    ("6.022e23", "602200000000000000000000", 1),
    (r"2\pi", r"\boxed{2π}", 1),
    ("-5", r"\boxed{−5}", 1),
    ("0", r"\boxed{\sqrt{12}-2\sqrt{3}}", 1),
    ("1e400", r"\boxed{10^{400}}", 1),
    ("1234567.89", r"\boxed{1234567.80}", 0),
    ("1e5", "100000", 1),
    ("1E5", r"\boxed{10^5}", 1),
    ("2e^3", r"\boxed{2e^3}", 1),
    ("e-5", r"\boxed{1e-5}", 0),
    ("1e-05", r"$1\text{e-}5$", 0),
    (r"\$18.90", r"\(18.9\)", 1),
    ("10%", "10 percent", 1),
    ("10%", "The answer is 10%.", 1),
    (r"\text{5 dollars}", r"\boxed{5}", 1),
    ("1.5e-3", r"\boxed{\frac{3}{2000}}", 1),
    ("-1e-05", r"\boxed{-0.00001}", 1),
    ("1e-05", r"\boxed{-0.00001}", 0),
    ("Paris", r"\boxed{Paris}", 1),
    ("Paris", r"\boxed{\text{Paris}}", 1),
    ("B", r"\boxed{\text{B}}", 1),
    (r"\begin{pmatrix}1e-9\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2e-9\\2\end{pmatrix}}", 0),
    ("45°", "   " * 1300 + "45°", 1),
    ("5$", r"\boxed{5}", 1),
]


@pytest.mark.parametrize(("answer", "text", "right"), NOTATIONS)
def test_numbers_are_read_in_all_notations(answer: str, text: str, right: int) -> None:
    assert math(ask(answer), say(text)) == right
    check_answer(ask(answer))


@pytest.mark.parametrize("answer", ["?", "", "5‰", "3⅖", "2∛3", r"5 \pm"])
def test_an_answer_that_does_not_equal_itself_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="answer"):
        check_answer(ask(answer))


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=30, deadline=None)
def test_a_number_of_json_equals_its_other_notations(number: float) -> None:
    exact = Decimal(repr(number))
    digits, _, power = f"{exact:e}".partition("e")
    asked = ask(json.dumps(number))
    assert math(asked, say(rf"\boxed{{{digits} \times 10^{{{int(power)}}}}}")) == 1
    assert math(asked, say(rf"\boxed{{{exact:f}}}")) == 1
    if number:
        assert math(asked, say(rf"\boxed{{{digits} \times 10^{{{int(power) + 1}}}}}")) == 0
