"""Answers of the data that have several parts: read whole, or refused by a sentence."""

from __future__ import annotations

import pytest

from spmd_rl.rewards.answers.deepscaler import deepscaler
from spmd_rl.rewards.answers.math import check_answer, math
from tests.unit.rewards.cases import ask, say

SYSTEM = ["x=1,y=2", r"x=1\text{ and }y=2", r"\begin{cases}x=1\\y=2\end{cases}", "(x,y)=(1,2)"]
TWO = ["1,2", "x=1,x=2", r"x=1\text{ or }x=2", r"x=2\lor x=1", r"\{2,1\}", r"x\in\{1,2\}"]
LISTS = {
    r"x=1,x=\pm 2": ["1,2,-2", "x=1,x=2,x=-2", r"x=1,\pm2", r"\{-2,1,2\}", r"x=1\lor x=\pm2"],
    r"$x=1,x=\pm 2$": ["1,2,-2"],
    r"1, \pm 2": ["1,2,-2", r"\pm2,1"],
    r"x=\pm 2": ["2,-2", r"\pm2", "x=2,-2", "±2"],
    "x=±2": ["2,-2"],
    r"\frac{1\pm\sqrt5}{2}": [r"\frac{1-\sqrt5}2,\frac{1+\sqrt5}2", r"\frac{1\pm\sqrt5}{2}"],
    "x=1 or x=2": TWO,
    "1 or 2": TWO,
    r"x=1 \text{ or } x=2": TWO,
    r"x=1 \textrm{ or } x=2": TWO,
    r"x=1 \mbox{ or } x=2": TWO,
    r"x=1 ~\text{or}~ x=2": TWO,
    r"x=1 \quad \text{or} \quad x=2": TWO,
    r"1 \, \text{or} \, 2": TWO,
    r"x=1 \lor x=2": TWO,
    r"x=1 \vee x=2": TWO,
    r"$x=1$ or $x=2$": TWO,
    r"\(1\) and \(2\)": TWO,
    r"x=1 \land y=2": SYSTEM,
    r"\begin{cases} x=1 \\ y=2 \end{cases}": SYSTEM,
    r"\[\begin{cases} x=1, \\ y=2. \end{cases}\]": SYSTEM,
    r"\left\{\begin{array}{l} x=1 \\ y=2 \end{array}\right.": SYSTEM,
    r"\begin{array}{rl} x&=1 \\ y&=2 \end{array}": SYSTEM,
    r"\begin{aligned} x&=1 \\ y&=2 \end{aligned}": SYSTEM,
    r"\begin{align*} x=&1 \\[2pt] y=&2 \end{align*}": SYSTEM,
    r"\begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array}": [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"],
    r"(1,2) \text{ and } (3,4)": ["(3,4),(1,2)", r"(1,2)\text{ or }(3,4)"],
    r"\langle 1, 2 \rangle": ["(1,2)", r"\left\langle 1,2\right\rangle"],
    "1,000, 2,000": ["2000,1000", r"1,000 \text{ and } 2,000"],
    r"20 \text{ cm}, 30 \text{ cm}": ["30,20", r"30\text{ cm},20\text{ cm}"],
    r"5 \text{ cm and } 7 \text{ cm}": ["5,7"],
    r"11,\! 111,\! 100": ["11111100", "11,111,100"],
    "3:4:5": ["3:4:5", "6 : 8 : 10"],
    r"f(x)=x^2+1, g(x)=x": [r"f(x)=x^2+1,\ g(x)=x"],
    r"x<1 \text{ or } x>2": [r"x>2\text{ or }x<1"],
    r"\approx 3.14": ["3.14", r"\approx 3.14"],
    r"5 \text{ cm}^2": ["5"],
    r"\log_2 8": ["3"],
    "The answer is $5$.": ["5"],
}
PARTS = ["1", "2", "-2", "3", "4", "20", "x=1", "x=2", "y=2", "x", "x>2", "x<1", "(3,4)", "3/20"]


@pytest.mark.parametrize("answer", LISTS)
def test_all_parts_of_an_answer_are_read(answer: str) -> None:
    check_answer(ask(answer))
    for said in LISTS[answer]:
        assert math(ask(answer), say(rf"\boxed{{{said}}}")) == 1, said
        assert deepscaler(ask(answer), say(rf"</think>\boxed{{{said}}}")) == 1, said
    if len(LISTS[answer]) > 1 and answer != r"\langle 1, 2 \rangle" and "3.14" not in answer:
        right = [part for part in PARTS if math(ask(answer), say(rf"\boxed{{{part}}}"))]
        assert right == [], "a part alone is not the answer"


@pytest.mark.parametrize("said", [r"x=1,x=\pm 2", r"x=1\text{ or }x=\pm2", "1,2,-2"])
def test_all_parts_are_read_outside_of_a_box(said: str) -> None:
    for text in (f"The answer is ${said}$.", rf"so \({said}\)", rf"hence \[{said}\]"):
        assert math(ask(r"x=1,x=\pm 2"), say(text)) == 1, text
        assert math(ask("2"), say(text)) == 0, text


REFUSED = r"""
(1) 5 (2) 7
(1) 5; (2) 7
(a) 5, (b) 7
\text{(a) } 5 \quad \text{(b) } 7
(i) 5 (ii) 7
a) 5 b) 7
1. 5 2. 7
(1) $5$ (2) $7$
5 ft 3 in
5 \text{ feet } 3 \text{ inches}
3 hours 20 minutes
2 h 30 min
3\text{ h }20\text{ min}
1 dollar 20 cents
5^\circ 30'
5°30'
17 \text{ R } 3
1 \text{ to } 3
Amy 5 Bob 7
5 (7)
5 (or 7)
1 \quad 2
1 \\ 2
x=1 | x=2
x=1 \quad x=2
x=1 \\ y=2
x=1 y=2
a=3 \implies b=2
2024-01-05
1, 2, \ldots, 10
x=1+2k, k \in \mathbb{Z}
\{x \mid 1 < x < 2\}
x=2, y \in \{1, 3\}
\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases}
\begin{cases} 2 & \text{if } n \text{ is even} \\ 1 & \text{if } n \text{ is odd} \end{cases}
So $x=2$ and then $y=3$
""".strip().splitlines()


@pytest.mark.parametrize("answer", REFUSED)
def test_an_answer_that_cannot_be_read_whole_is_refused_by_its_text(answer: str) -> None:
    for check in (check_answer, lambda prompt: math(prompt, say(r"\boxed{7}"))):
        with pytest.raises(ValueError, match="of this prompt") as caught:
            check(ask(answer))
        assert repr(answer) in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("-3", "The answer is −3.", 1),
        ("-3", "The answer is –3.", 1),
        ("-3", "The answer is －3.", 1),
        ("-3", r"\boxed{−3}", 1),
        ("-3", "so $x = −3$", 1),
        ("−3", "The answer is -3.", 1),
        ("−3", "The answer is 3.", 0),
        ("3", "The answer is −3.", 0),
        (r"x−1", r"\boxed{x-1}", 1),
        ("(−1,2)", r"\boxed{(–1,2)}", 1),
        ("3", "See pages 2–3", 0),
    ],
)
def test_minus_signs_of_other_code_points(answer: str, text: str, right: int) -> None:
    assert math(ask(answer), say(text)) == right
