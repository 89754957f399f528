"""IFEval's checks, beside the published ones, and the grader over them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spmd_rl.rewards.instructions.graders import ifeval, loose_forms
from spmd_rl.rewards.instructions.ifeval_checks import CHECKS, count_sentences
from tests.unit.rewards.cases import ask, say
from tests.unit.rewards.published import published_checks

# the checks of these need models of nltk, which are downloads
OURS_ALONE = {"length_constraints:number_sentences"}
PIECES = [
    *("dog", "Cat", "the", "HELLO", "U.S.", "é", "My answer is yes.", "P.S. bye", "p. p. s. x"),
    *(", ", ". ", "! ", " ", "\n", "\n\n", "***", "******", "\n***\n", "* a\n", "- b\n", "-"),
    *("[place]", "[]", "*bold*", "**very bold**", "<<Title>>", "<< >>", '"', "'", "{}", "```"),
    *("SECTION 1", "Section 2 ", "```json\n", '{"a": 1}', "end", "END.", "2024", "<", ">", "**"),
]
WORDS = ["dog", "cat", "hello", "section", "end"]
RELATIONS = ["less than", "at least"]


def _arguments(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Arguments of every instruction that has some."""
    number, relation = draw.randrange(1, 4), draw.choice(RELATIONS)
    words = draw.sample(WORDS, 2)
    return {
        "keywords:existence": {"keywords": words},
        "keywords:frequency": {"keyword": words[0], "frequency": number, "relation": relation},
        "keywords:forbidden_words": {"forbidden_words": words},
        "keywords:letter_frequency": {
            "letter": draw.choice("aeE"),
            "let_frequency": number,
            "let_relation": relation,
        },
        "language:response_language": {"language": draw.choice(["en", "de"])},
        "length_constraints:number_sentences": {"num_sentences": number, "relation": relation},
        "length_constraints:number_paragraphs": {"num_paragraphs": number},
        "length_constraints:number_words": {"num_words": 3 * number, "relation": relation},
        "length_constraints:nth_paragraph_first_word": {
            "num_paragraphs": number,
            "nth_paragraph": draw.randrange(1, number + 1),
            "first_word": words[0],
        },
        "detectable_content:number_placeholders": {"num_placeholders": number},
        "detectable_content:postscript": {
            "postscript_marker": draw.choice(["P.S.", "P.P.S", "PS:", "end"])
        },
        "detectable_format:number_bullet_lists": {"num_bullets": number},
        "detectable_format:number_highlighted_sections": {"num_highlights": number},
        "detectable_format:multiple_sections": {
            "section_spliter": draw.choice(["SECTION", "Section"]),
            "num_sections": number,
        },
        "combination:repeat_prompt": {"prompt_to_repeat": draw.choice(["dog", "The"])},
        "startend:end_checker": {"end_phrase": draw.choice(["end", "END.", "dog"])},
        "change_case:capital_word_frequency": {
            "capital_frequency": number,
            "capital_relation": relation,
        },
    }


def _text(draw: random.Random, name: str) -> str:
    text = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
    if name == "change_case:english_capital" and draw.random() < 0.8:
        return text.upper()
    if name == "change_case:english_lowercase" and draw.random() < 0.8:
        return text.lower()
    if name == "detectable_format:json_format" and draw.random() < 0.5:
        return (
            draw.choice(["```json\n", "```", "", " "]) + draw.choice(['{"a": 1}', "[", "3"]) + "```"
        )
    if name == "change_case:capital_word_frequency":
        return text.replace("'", " ")  # nltk's words of `x'P.S.` are none
    if name == "startend:quotation" and draw.random() < 0.5:
        return f'"{text}"'
    return text


def test_checks_agree_with_the_published_ones_on_generated_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nltk = pytest.importorskip("nltk")
    from nltk.tokenize.destructive import NLTKWordTokenizer

    published = published_checks("ifeval")
    assert set(published) == set(CHECKS)
    monkeypatch.setattr(nltk, "word_tokenize", NLTKWordTokenizer().tokenize)
    differ, verdicts = [], {}
    for name in sorted(set(CHECKS) - OURS_ALONE):
        heavy = name.startswith(("language", "change_case:english"))  # langdetect
        for seed in range(60 if heavy else 1000):
            draw = random.Random(seed)
            given, text = _arguments(draw).get(name, {}), _text(draw, name)
            checker = published[name](name)
            checker.build_description(**given)
            ours, theirs = CHECKS[name](text, given), bool(checker.check_following(text))
            verdicts.setdefault(name, set()).add(theirs)
            if ours != theirs:
                differ.append((name, given, text, ours, theirs))
    assert differ == []
    assert {name for name, seen in verdicts.items() if seen != {True, False}} == set()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("", 0),
        ("One", 1),
        ("One.", 1),
        ("One. Two.", 2),
        ("One! Two? Three", 3),
        ("Mr. Smith went. He is J. R. Tolkien.", 2),
        ("e.g. this one", 1),
        ("Wait... What?", 2),
        ('He said "Go!" Then he left.', 2),
        ("Pi is 3.14 or so. Yes.", 2),
        ("See example.com for it.", 1),
        ("First.\n\nSecond.", 2),
        ("What?! No.", 2),
        ("It ends (here.) Then on.", 2),
        ("He met Dr. No", 1),
    ],
)
def test_sentences_are_counted(text: str, number: int) -> None:
    assert count_sentences(text) == number


def grade(text: str, *instructions: tuple[str, dict[str, Any]]) -> dict[str, float]:
    names, given = [name for name, _ in instructions], [given for _, given in instructions]
    return ifeval(ask(instruction_id_list=names, kwargs=given), say(text))


NO_COMMA = ("punctuation:no_comma", {"num_words": None})
TITLE = ("detectable_format:title", {})


def test_prompt_and_instructions_are_graded_strictly_and_loosely() -> None:
    both = grade("<<T>> no comma", NO_COMMA, TITLE)
    assert both == dict.fromkeys(("reward", "strict", "loose", "strict_share", "loose_share"), 1.0)
    one = grade("Sure, here it is:\nno comma", NO_COMMA, TITLE)
    assert (one["reward"], one["loose"]) == (0, 0)
    assert (one["strict_share"], one["loose_share"]) == (0, 0.5)
    loose = grade("Sure, here it is:\n<<T>>", NO_COMMA)
    assert (loose["reward"], loose["strict"], loose["loose"]) == (0, 0, 1)


@pytest.mark.parametrize("text", ["", " ", "a</think>", "<think>no end"])
def test_no_response_follows_no_instruction(text: str) -> None:
    assert grade(text, NO_COMMA)["loose"] == 0


def test_thinking_is_not_graded() -> None:
    assert grade("<think>a, b</think>c", NO_COMMA)["reward"] == 1


def test_loose_forms() -> None:
    assert loose_forms("a\n*b*\nc")[:4] == ["a\n*b*\nc", "*b*\nc", "a\n*b*", "*b*"]
    assert loose_forms("a\n*b*\nc")[4:] == ["a\nb\nc", "b\nc", "a\nb", "b"]


@pytest.mark.parametrize(
    ("meta", "problem"),
    [
        ({}, "no list 'instruction_id_list'"),
        ({"instruction_id_list": []}, "no list 'instruction_id_list'"),
        ({"instruction_id_list": ["x:y"], "kwargs": [{}]}, "'x:y' of this record is none of those"),
        ({"instruction_id_list": [TITLE[0]], "kwargs": []}, "no list 'kwargs' as long as"),
        ({"instruction_id_list": ["startend:end_checker"], "kwargs": [{}]}, "lacks 'end_phrase'"),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["("]}]},
            "are wrong for keywords:existence",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 3, "relation": "about"}],
            },
            "'about' is neither 'less than' nor 'at least'",
        ),
    ],
)
def test_a_record_that_is_wrong_is_an_error(meta: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        ifeval(ask(**meta), say("text"))
