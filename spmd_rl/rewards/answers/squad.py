"""Short answers to questions, compared as SQuAD and HotpotQA compare them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator

from spmd_rl.rewards.answers.final_text import final_answer
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

ANSWERS = "answers"  # the key of the record with more answers that are right
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = ("yes", "no", "noanswer")  # such an answer is wholly right or wholly wrong


def exact_match(prompt: Prompt, sample: Sample) -> float:
    """Return 1 if the response is one of the answers, apart from case, articles and punctuation.

    Raises: ValueError if the record's `answers` are no list of texts.
    """
    said = normalised(final_answer(prompt, sample))
    return float(any(said == normalised(answer) for answer in answers_of(prompt)))


def f1(prompt: Prompt, sample: Sample) -> float:
    """Return how well the response's words agree with the best of the answers: 0 to 1.

    It is the harmonic mean of precision and recall over words, each counted as often as it occurs.
    Raises: ValueError if the record's `answers` are no list of texts.
    """
    said = normalised(final_answer(prompt, sample))
    return max(word_f1(said, normalised(answer)) for answer in answers_of(prompt))


def check_answers(prompt: Prompt) -> None:
    """Raise a ValueError for a prompt whose record's `answers` are no list of texts."""
    list(answers_of(prompt))


def normalised(text: str) -> str:
    """Return a text in lower case without punctuation, articles and superfluous spaces."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


def word_f1(said: str, answer: str) -> float:
    """Return the F1 of two normalised texts."""
    if said == answer:
        return 1.0
    said_words, answer_words = said.split(), answer.split()
    if said in _CLOSED or answer in _CLOSED:
        return 0.0
    num_same = sum((Counter(said_words) & Counter(answer_words)).values())
    return 2 * num_same / (len(said_words) + len(answer_words))


def answers_of(prompt: Prompt) -> Iterator[str]:
    """Yield the prompt's answer, and those of its record's list `answers`.

    Raises: ValueError if that is no list of texts.
    """
    more = prompt.meta.get(ANSWERS)
    more = [] if more is None else more
    if not isinstance(more, list) or not all(isinstance(answer, str) for answer in more):
        raise ValueError(f"{ANSWERS!r} of this record is no list of texts")
    if prompt.answer or not more:
        yield prompt.answer
    yield from more
