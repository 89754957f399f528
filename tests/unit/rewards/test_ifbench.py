"""IFBench's checks, beside the published ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from spmd_rl.rewards.ifbench_checks import CHECKS
from spmd_rl.rewards.ifeval_checks import CHECKS as IFEVAL
from spmd_rl.rewards.instructions import ifbench
from tests.unit.rewards.cases import ask, say
from tests.unit.rewards.published import published_checks
from tests.unit.rewards.test_ifeval import _arguments as ifeval_arguments

PIECES = [
    *("and", "But", "so,", "I", "me", "your/my", "12", "3.5", "level", "tests", "dog", "cat"),
    *(". ", ", ", "! ", "? ", "?!", ";", ":", " ", " ", " ", "\n", "\n\n", "日本", "é", "apple"),
    *("<i>", "</i>", "My Answer:", "My Conclusion:", "Future Outlook:", "- "),
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
            if not text.strip():  # no response follows no instruction
                continue
            checker = published[name](name)
            checker.build_description(**given)
            ours, theirs = CHECKS[name](text, given), bool(checker.check_following(text))
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


def test_an_instruction_that_needs_a_corpus_is_refused() -> None:
    prompt = ask(instruction_id_list=["words:start_verb"], kwargs=[{}])
    with pytest.raises(
        ValueError, match="'words:start_verb' of this record is none of those of IFB"
    ):
        ifbench(prompt, say("Go"))


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
