"""DAPO's and DeepScaler's rules, multiple choice, and short answers as of SQuAD."""

from __future__ import annotations

import random
import re
import string
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.rewards.answers import squad
from spmd_rl.rewards.answers.dapo import dapo
from spmd_rl.rewards.answers.deepscaler import deepscaler
from spmd_rl.rewards.answers.multiple_choice import chosen, multiple_choice, shuffled
from spmd_rl.rewards.answers.squad import exact_match, f1
from tests.unit.rewards.cases import ask, say


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("34", "Answer: 34", True),
        ("34", "answer : 34", True),
        ("34", "Answer: $34$", True),
        ("34", r"Answer: \boxed{34}", True),
        ("34", "Answer: x = 34", True),
        ("34", "Answer: 34 km", True),
        ("34", "Answer: 34 degrees", True),
        ("34", r"Answer: 34^\circ", True),
        ("34", r"Answer: 34\text{ cm}", True),
        ("1000", "Answer: 1,000", True),
        ("1,000", "Answer: 1000", True),
        (r"\frac{1}{2}", r"Answer: \frac12", True),
        (r"\sqrt{3}", r"Answer: \sqrt3", True),
        ("B", r"Answer: \textbf{B}", True),
        ("34", "Answer: 33\nAnswer: 34", True),
        ("34", "Answer: 34\nthat is all", True),
        ("10", "Answer: a 10", True),
        ("10", "Answer: \\$10", True),
        ("-5", "Answer: -5", True),
        ("x+1", "Answer: x + 1", True),
        ("34", "34", False),
        ("34", "The answer is 34", False),
        ("34", "Answer: 35", False),
        ("34", "Answer: 34\nAnswer: 35", False),
        ("34", "Answer: 34.", False),
        ("34", "Answer:", False),
        ("34", "", False),
        ("0.5", r"Answer: \frac{1}{2}", False),
        ("34", "Answer: 34" + " and so on" * 40, False),
        ("34", "thirty-four", False),
    ],
)
def test_dapo(answer: str, text: str, right: bool) -> None:
    graded = dapo(ask(answer), say(text))
    assert graded == {"reward": 1.0 if right else -1.0, "accuracy": float(right)}


@pytest.mark.parametrize("answer", ["x=1, x=2", "x=1 or x=2", r"x=1 \lor x=2", "a=b=2"])
def test_dapo_refuses_an_answer_of_which_a_part_would_count(answer: str) -> None:
    with pytest.raises(ValueError, match="the answer .* of this prompt"):
        dapo(ask(answer), say("Answer: 2"))
    assert dapo(ask("x=2"), say("Answer: 2"))["reward"] == 1


WRITTEN = ["{}", "${}$", r"\boxed{{{}}}", "x = {}", "{} units", r"{}\text{{ cm}}", " {} "]


def _noise(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(string.printable, k=draw.randrange(length)))


def test_dapo_finds_a_thousand_answers_at_the_end() -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        number = draw.randrange(-(10**9), 10**9)
        text = f"{_noise(draw, 400)}\nAnswer: {draw.choice(WRITTEN).format(number)}"
        assert dapo(ask(str(number)), say(text))["reward"] == 1, text
        assert dapo(ask(str(number + 1)), say(text))["reward"] == -1, text


@pytest.mark.parametrize(
    ("answer", "response", "right"),
    [
        ("34", r"\boxed{34}", True),
        ("34", r"\boxed{34}.", True),
        ("34", r"\boxed{ 34 }", True),
        ("34", r"\boxed{x=34}", True),
        ("34", r"\boxed{34\text{ cm}}", True),
        ("34", r"\boxed{34^\circ}", True),
        ("34", r"\boxed{34\%}", True),
        ("34", r"\boxed{\$34}", True),
        ("34", r"\boxed{33}, no, \boxed{34}", True),
        ("34", r"\boxed{34.0}", True),
        ("34", r"\boxed{30+4}", True),
        (r"\boxed{34}", r"\boxed{34}", True),
        (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}", True),
        (r"\frac{1}{2}", r"\boxed{\frac12}", True),
        (r"\frac{1}{2}", r"\boxed{1/2}", True),
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        (r"\frac{1}{2}", r"\boxed{.5}", True),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
        (r"(1,2)", r"\boxed{\left( 1, 2 \right)}", True),
        ("x+1", r"\boxed{1+x}", True),
        ("34", r"\boxed{35}", False),
        ("34", "34", False),
        ("34", "The answer is 34.", False),
        ("34", r"\boxed{}", False),
        ("34", r"\boxed{34", False),
        ("34", "", False),
        ("34", r"\boxed{34} but \boxed{35}", False),
        (r"(1,2)", r"\boxed{(2,1)}", False),
        (r"\frac{1}{2}", r"\boxed{\frac{2}{1}}", False),
        ("34", r"\boxed{34x}", False),
    ],
)
def test_deepscaler(answer: str, response: str, right: bool) -> None:
    assert deepscaler(ask(answer), say(f"<think>or \\boxed{{7}}</think>{response}")) == right
    assert deepscaler(ask(answer), say(response)) == 0, "without the end of thinking"
    assert deepscaler(ask(answer), say(f"{response}</think>")) == 0, "what is thought"


def test_deepscaler_finds_a_thousand_last_boxes() -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        number = draw.randrange(-(10**9), 10**9)
        text = f"{_noise(draw, 200)}</think>it is \\boxed{{ {number} }}."
        assert deepscaler(ask(str(number)), say(text)) == 1, text
        if seed % 10 == 0:  # math-verify is asked as well
            assert deepscaler(ask(str(number + 1)), say(text)) == 0, text


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("**B**", "B"),
        ("B.", "B"),
        ("Answer: B", "B"),
        ("Answer: (B)", "B"),
        ("Answer: **B**", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B) because A is wrong.", "B"),
        ("The correct answer is **(B)**", "B"),
        ("the correct option is B", "B"),
        ("Answer: $B$", "B"),
        (r"Answer: \text{B}", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B}}", "B"),
        (r"\boxed{(B)}", "B"),
        (r"\boxed{b}", "B"),
        (r"the answer is $\boxed{B}$", "B"),
        ("Answer: A\nNo.\nAnswer: B", "B"),
        ("<think>Answer: A</think>Answer: B", "B"),
        ("I think so.\n\nB", "B"),
        ("<answer> B </answer>", "B"),
        ("blue", "B"),
        (r"\boxed{blue}", "B"),
        ("A) red\nB) blue\nC) green\nD) grey", ""),
        ("The answer is an apple", ""),
        ("Better not", ""),
        ("Answer: E", ""),
        ("", ""),
        ("<think>Answer: B</think>", ""),
        (r"\boxed{A or B}", ""),
        ("the answer's B-side", ""),
    ],
)
def test_multiple_choice(text: str, letter: str) -> None:
    choices = ["red", "blue", "green", "grey"]
    assert multiple_choice(ask("B", choices=choices), say(text)) == (letter == "B")
    assert multiple_choice(ask("blue", choices=choices), say(text)) == (letter == "B")
    assert multiple_choice(ask("D", choices=choices), say(text)) == 0


@pytest.mark.parametrize("answer", ["", "E", "purple", "AB"])
def test_an_answer_that_is_no_choice_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="neither a letter up to B nor the text of a choice"):
        multiple_choice(ask(answer, choices=["red", "blue"]), say("A"))


FORMS = ["Answer: {}", "So the answer is ({}).", r"\boxed{{{}}}", "well\n{}", "**{}**", "option {}"]


def test_a_thousand_letters_are_found() -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        letter, other = draw.choices(string.ascii_uppercase[:10], k=2)
        text = draw.choice(FORMS).format(letter)
        assert chosen(text, ["text"] * 10) == letter
        said = say(f"{draw.choice(FORMS).format(other)}</think>{text}")
        assert multiple_choice(ask(letter), said) == 1, text


@settings(max_examples=50)
@given(st.lists(st.text(max_size=5), min_size=1, max_size=6, unique=True), st.integers())
def test_choices_are_shuffled_by_the_seed_alone(texts: list[str], seed: int) -> None:
    right, wrong = texts[0], texts[1:]
    choices, letter = shuffled(right, wrong, seed)
    random.random()
    assert (choices, letter) == shuffled(right, wrong, seed)
    assert sorted(choices) == sorted(texts)
    assert choices[string.ascii_uppercase.index(letter)] == right


def test_the_right_choice_stands_everywhere_alike() -> None:
    letters = Counter(shuffled(f"right{n}", ["x", "y", "z"], 5)[1] for n in range(400))
    assert set(letters) == set("ABCD") and min(letters.values()) > 60


@pytest.mark.parametrize(
    ("answers", "said", "exact", "score"),
    [
        (["Paris"], "Paris", 1, 1),
        (["Paris"], "paris.", 1, 1),
        (["Paris"], "The Paris", 1, 1),
        (["Paris"], "  Paris\n", 1, 1),
        (["Paris"], "<think>Rome</think> Paris", 1, 1),
        (["Paris"], "It is <answer>Paris</answer>", 1, 1),
        (["Paris"], "<answer>Rome</answer><answer>Paris</answer>", 1, 1),
        (["Paris"], "Rome", 0, 0),
        (["Paris"], "", 0, 0),
        (["Paris"], "Paris France", 0, 2 / 3),
        (["Paris"], "in Paris, France", 0, 1 / 2),
        (["a big red dog"], "big dog", 0, 4 / 5),
        (["big dog"], "dog big", 0, 1),
        (["dog dog"], "dog", 0, 2 / 3),
        (["dog"], "dog dog", 0, 2 / 3),
        (["Rome", "Paris"], "Paris", 1, 1),
        (["Rome Italy", "Paris France"], "Paris", 0, 2 / 3),
        (["yes"], "yes", 1, 1),
        (["yes"], "yes it is", 0, 0),
        (["yes it is"], "yes", 0, 0),
        (["no"], "No.", 1, 1),
        (["noanswer"], "noanswer", 1, 1),
        (["no way"], "no", 0, 0),
        (["U.S."], "US", 1, 1),
        (["rock'n'roll"], "rocknroll", 1, 1),
        (["an apple"], "apple", 1, 1),
        (["1,000"], "1000", 1, 1),
        (["theatre"], "the atre", 0, 0),
        ([""], "", 1, 1),
        (["the"], "a", 1, 1),
    ],
)
def test_squad(answers: list[str], said: str, exact: float, score: float) -> None:
    first, *more = answers
    assert exact_match(ask(first, answers=more), say(said)) == exact
    assert f1(ask(first, answers=more), say(said)) == pytest.approx(score)
    if first:
        assert f1(ask("", answers=answers), say(said)) == pytest.approx(score)


def test_no_more_answers_than_that_of_the_record() -> None:
    """A null, as a table has it, says that there are none."""
    assert exact_match(ask("x", answers=None), say("x")) == 1.0
    assert f1(ask("x", answers=None), say("y")) == 0.0


def test_answers_that_are_no_list_of_texts_are_an_error() -> None:
    with pytest.raises(ValueError, match="'answers' of this record is no list of texts"):
        f1(ask("x", answers="y"), say("x"))


WORDS = "the a cat Cat. sat on mat yes no 1,0 -- an".split()


def test_a_thousand_f1_are_those_of_the_published_rule() -> None:
    for seed in range(1000):
        draw = random.Random(seed)
        said, gold = (" ".join(draw.choices(WORDS, k=draw.randrange(8))) for _ in range(2))
        score = squad.word_f1(squad.normalised(said), squad.normalised(gold))
        assert score == pytest.approx(_published_f1(said, gold)), (said, gold)


def _published_f1(said: str, gold: str) -> float:
    """Return F1 by precision and recall, word by word, with HotpotQA's rule for yes and no."""
    words = [
        [
            word
            for word in re.split(r"\s+", "".join(c for c in text.lower() if c not in punctuation))
            if word not in ("", "a", "an", "the")
        ]
        for text, punctuation in ((said, string.punctuation), (gold, string.punctuation))
    ]
    if words[0] == words[1]:
        return 1.0
    if any(" ".join(one) in ("yes", "no", "noanswer") for one in words):
        return 0.0
    left, same = list(words[1]), 0
    for word in words[0]:
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(words[0]), same / len(words[1])
    return 2 * precision * recall / (precision + recall)
