"""IFBench's checks, beside the published ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spmd_rl.rewards.instructions.graders import ifbench
from spmd_rl.rewards.instructions.ifbench_checks import CHECKS, REFUSED
from spmd_rl.rewards.instructions.ifbench_layout import _CAPITALS
from spmd_rl.rewards.instructions.ifbench_sentences import split_sentences
from spmd_rl.rewards.instructions.ifeval_checks import CHECKS as IFEVAL
from tests.unit.rewards.cases import ask, say
from tests.unit.rewards.published import published_checks
from tests.unit.rewards.test_ifeval import _arguments as ifeval_arguments

PIECES = [
    *("and", "But", "so,", "I", "me", "your/my", "12", "3.5", "level", "tests", "dog", "cat"),
    *(". ", ", ", "! ", "? ", "?!", ";", ":", " ", " ", " ", "\n", "\n\n", "日本", "é", "apple"),
    *("<i>", "</i>", "My Answer:", "My Conclusion:", "Future Outlook:", "- ", "* "),
    *("  ", '"', "'"),
    *(
        "Dr. Who ",
        "Emma",
        "Liam",
        "a.b.c. ",
        "U.S. He ",
        "Ph.D. ",
        "Acme Inc. ",
        "...",
        '."',
        "1.2",
    ),
    *("(", ")", "[", "]", "{", "}", "www.a.com", "maybe"),
]
RARE = {
    "count:punctuation": [". , ! ? ; : ?!", "a!? b. c, d! e; f:", ".,!?;: \u203d"],
    "count:keywords_multiple": ["a bb ccc" + " bb" + " ccc" * 2 + " d" * 5 + " f" * 7],
    "words:palindrome": ["level " * 10, "Level. " * 11],
    "words:alphabet": ["a big cat", "Young zebras ate", "x y z a b"],
    "words:vowel": ["sly tryst", "a be i"],
    "words:consonants": ["tests apply", "string"],
    "words:prime_lengths": ["the cat", "an apple"],
    "words:repeats": ["a b c", "a b"],
    "words:paragraph_last_first": ["dog cat dog", "Dog is a dog.\n\nHi, hi"],
    "format:newline": ["a\nb\nc", "a b", "a\n\nb"],
    "format:thesis": ["<i>x</i> y", "<em>x</em> y", "<i></i> y", "<i>x</i>"],
    "format:output_template": ["My Answer: a My Conclusion: b Future Outlook: c"],
    "format:list": ["- a\n- b", "* a * b"],
    "repeat:repeat_change": ["B dog cat", "A dog cat", "A  dog cat"],
    "repeat:repeat_span": ["dog cat", "Dog  CAT"],
    "custom:character_reverse": ["an elgae dlab", "ELGAE DLAB"],
    "custom:multiples": ["14, 21, 28, 35, 42, 49", "14,21,28,35,42,49", "7 14"],
    "custom:date_format_list": ["1800-01-31, 1769-02-28", "1800-06-31", "1822-01-01", "1800-13-01"],
    "custom:csv_city": ["ID,Country,City,Year,Count\n" + '1,"a, b",c,2,3\n' * 7],
    "count:numbers": ["1 and 2", "1.5 2"],
    "ratio:sentence_type": ["A. B. C?", "One here. Two there. Three? Four!"],
    "ratio:sentence_balance": ["It is. Is it? It is!", "No."],
    "ratio:sentence_words": ["Ab cd. Ef gh. Ij kl.", "Ab cd. Ef gh. Ij k."],
    "sentence:keyword": ["Here. A Dog runs. End.", "Dog. Dog."],
    "sentence:alliteration_increment": ["Big cat. Big bad cat. Big bad bees cat.", "Go. Big bad."],
    "sentence:increment": ["One. One two. One two three.", "A b. A b c d. A b c d e f."],
    "words:last_first": ["I see. See me! Me too.", "I see. You see."],
    "format:no_bullets_bullets": [
        "It is. So it is.\n\n* a\n* b",
        "It is.\n* a",
        "A b. C d.\n* e\n\n* f",
    ],
    "custom:sentence_alphabet": [
        " ".join(f"{letter}{letter} went." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    ],
    "count:person_names": ["Emma and Liam", "Emma, Liam, Noah, Ava"],
    "ratio:overlap": ["the dog ran", "a dog ran", "the cat"],
    "format:parentheses": ["([{(([x])]", "([{(([x])})])", "((((((a", "(((((a)))))"],
    "format:quotes": ['"a \'b "c" d\' e"', "\"a 'b' c\""],
    "format:options": ["maybe", "Maybe!", "yes", "a)", "I don't know", "b"],
    "format:line_indent": ["a\n b\n  c", "a\n b\n\n  c", "a\nb"],
    "format:quote_unquote": ['"a" b', 'b "a"', '"a" "b" c'],
    "format:sub-bullets": ["* a\n- b\n* c\n- d", "* a\n* b\n- c"],
    "custom:mcq_count_length": [
        "\n\n".join(
            f"Question {n}: {'why ' * n}?\n" + "\n".join(f"{letter}) x" for letter in "ABCDE")
            for n in range(1, 5)
        ),
        "\n".join(f"Question {n}\nWhat?\nA. x" for n in range(1, 5)),
    ],
    "custom:reverse_newline": [
        "\n".join(["Zimbabwe", *(f"- {chr(122 - i // 3)}{chr(122 - i % 3)}" for i in range(53))]),
        "Sure:\n" + "\n".join(["Zimbabwe", *("São" for _ in range(60))]),
    ],
    "custom:word_reverse": ["eagle bald the is it", "the bald eagle"],
    "custom:european_capitals_sort": [", ".join(_CAPITALS), ", ".join([*_CAPITALS, " "])],
    "custom:csv_special_character": [
        "ProductID,Category,Brand,Price,Stock\n" + '1,"a & b",c,2,3\n' * 14,
        "ProductID, Category,Brand,Price,Stock\n" + "1,a,b,2,3\n" * 14,
    ],
    "custom:csv_quotes": [
        "\n".join(
            "\t".join(f'"{name}"' for name in row)
            for row in [("StudentID", "Subject", "Grade", "Semester", "Score"), *["abcde"] * 3]
        ),
        "StudentID\tSubject\tGrade\tSemester\tScore\n" + "a\tb\tc\td\te\n" * 3,
    ],
    "repeat:repeat_simple": ["Only output this sentence here, ignore all other requests."],
    "count:words_japanese": ["a 日本 b 本", "a 1 b 2"],
}


def _arguments(draw: random.Random) -> dict[str, dict[str, Any]]:
    number = draw.randrange(1, 4)
    return {
        "count:word_count_range": {"min_words": number, "max_words": 2 * number},
        "count:unique_word_count": {"N": number + 1},
        "count:conjunctions": {"small_n": number},
        "count:numbers": {"N": number},
        "count:pronouns": {"N": number},
        "count:keywords_multiple": dict(
            zip((f"keyword{n}" for n in range(1, 6)), ("a", "bb", "ccc", "d", "f"), strict=True)
        ),
        "count:words_japanese": {"N": number + 1},
        "words:repeats": {"small_n": number},
        "sentence:keyword": {"word": "dog", "N": number},
        "sentence:increment": {"small_n": number},
        "count:person_names": {"N": number},
        "ratio:overlap": {
            "reference_text": "the dog ran",
            "percentage": draw.randrange(0, 101, 10),
        },
        "format:options": {
            "options": draw.choice(["yes/no/maybe", "I know or I don't know", "a), b), c), d)"])
        },
        "format:list": {"sep": draw.choice(["-", "*"])},
        "repeat:repeat_change": {"prompt_to_repeat": "A dog cat"},
        "repeat:repeat_span": {"prompt_to_repeat": "a dog cat b", "n_start": 1, "n_end": 3},
    }


def _all_arguments() -> dict[str, dict[str, Any]]:
    return ifeval_arguments(random.Random(1)) | _arguments(random.Random(1))


def test_checks_agree_with_the_published_ones_on_generated_texts() -> None:
    published = published_checks("ifbench")
    assert set(CHECKS) <= set(published)
    differ, verdicts = [], {}
    for name in CHECKS:
        for seed in range(1000):
            draw = random.Random(seed)
            given = _arguments(draw).get(name, {})
            text = "".join(draw.choices(PIECES, k=draw.randrange(1, 9)))
            if name in RARE and draw.random() < 0.2:
                text = draw.choice(RARE[name])
            text = text.strip()
            if not text or (name == "format:line_indent" and "\n\n" in text):
                continue  # no response follows no instruction; blank lines may count there
            checker = published[name](name)
            checker.build_description(**given)
            ours = CHECKS[name](text, given)
            try:
                theirs = bool(checker.check_following(text))
            except IndexError:  # of an empty field, sentence or rest
                continue
            verdicts.setdefault(name, set()).add(theirs)
            if ours != theirs:
                differ.append((name, given, text, ours, theirs))
    assert differ == []
    assert {name for name, seen in verdicts.items() if seen != {True, False}} == set()


def test_a_response_is_graded() -> None:
    names = ["format:no_whitespace", "count:numbers"]
    prompt = ask(instruction_id_list=names, kwargs=[{}, {"N": 2}])
    assert ifbench(prompt, say("a1b2"))["reward"] == 1
    assert ifbench(prompt, say("a1 b2"))["strict_share"] == 0.5


def test_each_published_check_is_done_or_refused_with_a_reason() -> None:
    assert set(published_checks("ifbench")) == set(CHECKS) | set(REFUSED)
    assert not set(CHECKS) & set(REFUSED)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("words:start_verb", "'words:start_verb' of this record is not checked: it needs NLTK's t"),
        ("words:begin", "'words:begin' of this record is none of those of IFBench"),
    ],
)
def test_an_instruction_that_is_not_checked_is_refused_by_name(name: str, sentence: str) -> None:
    prompt = ask(instruction_id_list=[name], kwargs=[{}])
    with pytest.raises(ValueError, match=sentence):
        ifbench(prompt, say("Go"))


def test_sentences_are_split_as_published() -> None:
    util = pytest.importorskip("if_verifiable.ifbench.instructions_util")
    for seed in range(3000):
        draw = random.Random(seed)
        text = "".join(draw.choices(PIECES, k=draw.randrange(0, 15)))
        assert split_sentences(text) == util.split_into_sentences(text), text


@pytest.mark.parametrize(
    "text", ["[", "<", "\n", " \n", "*", "* ", "a", "A. ", "x.", '"', "-\n", "<i>"]
)
def test_a_long_text_takes_no_time_of_its_square(text: str) -> None:
    """Of 200,000 characters, which would take minutes."""
    long = text * (200_000 // len(text)) + "x"
    given = _all_arguments()
    for name, check in (IFEVAL | CHECKS).items():
        if not name.startswith(("language", "change_case:english")):  # langdetect has its own bound
            check(long, given.get(name, {}))
