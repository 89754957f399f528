r"""Multiple choice: forms in which a choice is said, and texts that say none."""

from __future__ import annotations

import re

import pytest

from spmd_rl.rewards.answers.boxed import in_last_box
from spmd_rl.rewards.answers.match import contains, exact
from spmd_rl.rewards.answers.multiple_choice import chosen, multiple_choice
from spmd_rl.rewards.answers.squad import exact_match, f1
from tests.unit.rewards.cases import ask, say

CITIES = ["Rome", "Paris", "A dog", "New York"]
SAY_B = r"""
B
b
(B)
[B]
B.
B:
B)
**B**
"B"
`B`
$B$
\(B\)
\text{B}
#### B
B. Paris
B) Paris
(B) Paris
[B] Paris
B: Paris
B - Paris
B — Paris
**B. Paris**
**B**. Paris
**B.** Paris
(B): Paris
b) Paris
B Paris
B, Paris
B. Paris, the capital of France
B. Because it is the capital.
<answer>B</answer>
<answer>B. Paris</answer>
<answer>(B)</answer>
<Answer>B</Answer>
It is <answer>**B**</answer>.
\boxed{B}
\boxed{b}
\boxed{B.}
\boxed{(B)}
\boxed{\text{B}}
\boxed{\textbf{(B)}}
\boxed{B. Paris}
\boxed{B) Paris}
\boxed{(B) Paris}
\boxed{B: Paris}
\boxed{B Paris}
\boxed{\text{B. Paris}}
\boxed{\text{B}\ \text{Paris}}
\boxed{\text{(B) }\text{Paris}}
\boxed{\textbf{(B)}\ Paris}
\boxed{B \quad \text{Paris}}
\boxed{\text{Paris}}
\boxed{Paris}
The final answer is $\boxed{\text{B}}$. Paris
B is the correct answer.
B is correct.
(B) is right
**B** is the best answer
So B is the answer.
Only B is true, A is not.
B would be correct
Option B
Option B is correct.
Answer: B
Answer: (B)
Answer: B. Paris
Answer: b
**Answer:** B
**Answer: B**
Answer - B
Answer = B
ANSWER: B
Ans: B
Final answer: B
Final Answer: **B**
"answer": "B"
{"answer": "B"}
The answer is B
The answer is B.
The answer is: B
The answer is (B) because A is wrong.
The answer is (b).
The answer is option B.
The answer is B, not A.
The answer is "B".
The answer is \textbf{B}
The answer is Paris.
The correct answer is **B. Paris**.
The correct answer is B) Paris
The correct answer to the question is B.
The correct choice is B
The best option would be B.
I choose B.
I would go with B
Therefore, B.
Thus (B).
It's B.
答案：B
答案是B
选B
A is wrong. Option A is incorrect. So the answer is B.
Option A is incorrect.

B
Answer: A

No. Answer: B
Paris
paris.
""".strip("\n")


def _forms(text: str) -> list[str]:
    """Return the lines, but for an empty one, which joins those around it."""
    joined = text.replace("\n\n", "\0")
    return [line.replace("\0", "\n\n") for line in joined.split("\n")]


@pytest.mark.parametrize("text", _forms(SAY_B))
def test_forms_that_choose_b(text: str) -> None:
    assert multiple_choice(ask("B", choices=CITIES), say(text)) == 1
    assert multiple_choice(ask("Paris", choices=CITIES), say(text)) == 1
    assert all(multiple_choice(ask(one, choices=CITIES), say(text)) == 0 for one in "ACD")
    needs_choices = "paris" in text.lower() and not re.search(r"[Bb]\W*[.):\]—*-]|is correct", text)
    assert needs_choices or multiple_choice(ask("B"), say(text)) == 1, "without choices"


CHOOSE_NONE = r"""
A dog ran away.
A dog barks at B
A city
I think so
Better not
Not B
B is incorrect.
B is not correct
Option B is wrong.
Option B is not right
The answer is not B
The answer is a city
The answer is an apple
The answer is A river.
Either A or B
A and B
The answer is A or B
The answer is A, B
Answer: A/B
Answer: A and B
Answer: A, B, C
\boxed{A, B}
\boxed{A or B}
\boxed{AB}
Vitamin B
Plan B costs more
the answer's B-side
The answer is B+ at best
Answer: B = 5
Answer: E
Answer:
A. Rome B. Paris
A) Rome

B) Paris

C) A dog
B. Rome
\boxed{B. Rome}
\boxed{Lyon}
\boxed{}
U.S.A.
""".strip("\n")


@pytest.mark.parametrize("text", ["", *_forms(CHOOSE_NONE)])
def test_texts_that_choose_nothing(text: str) -> None:
    for letter in "ABCD":
        if (letter, text) != ("A", "A. Rome B. Paris"):
            assert multiple_choice(ask(letter, choices=CITIES), say(text)) == 0, letter


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("A dog", "C"),
        ("The answer is A dog", "C"),
        ("The answer is A dog.", "C"),
        ("C. A dog", "C"),
        (r"\boxed{\text{A dog}}", "C"),
        (r"\boxed{C. A dog}", "C"),
        ("The answer is A because dogs bark.", "A"),
        ("The answer is A.", "A"),
        ("A.", "A"),
        ("A. Rome", "A"),
        ("D. New York", "D"),
        ("new york", "D"),
    ],
)
def test_the_text_of_a_choice_is_no_letter(text: str, letter: str) -> None:
    assert chosen(text, CITIES) == letter


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("Paris", r"\boxed{\text{Paris}}", 1),
        ("Paris", r"\boxed{\textbf{Paris}}", 1),
        ("Paris", r"\boxed{\mathrm{Paris}}", 1),
        ("Paris", r"\boxed{\text{\textbf{Paris}}}", 1),
        ("Paris", r"\boxed{$\text{Paris}$}", 1),
        (r"\text{Paris}", r"\boxed{Paris}", 1),
        (r"\text{Paris}", r"\boxed{\text{Paris}}", 1),
        ("New York", r"\boxed{\text{New York}}", 1),
        ("New York", r"\boxed{\text{New}\ \text{York}}", 1),
        ("New York", r"\boxed{New~York}", 1),
        ("5%", r"\boxed{5\%}", 1),
        ("5 km", r"\boxed{5\ \mathrm{km}}", 1),
        ("Rome", r"\boxed{\text{Paris}}", 0),
        ("text", r"\boxed{\text{Paris}}", 0),
        ("Paris", r"\text{Paris}", 0),
    ],
)
def test_words_in_a_box(answer: str, text: str, right: int) -> None:
    for grader in (exact_match, f1, exact, contains):
        assert in_last_box(grader)(ask(answer), say(text)) == right, grader
    assert in_last_box(exact_match)(ask("x", answers=[answer]), say(text)) == right
