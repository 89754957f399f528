"""The example of instructions: prompts can be followed and broken, and evaluations are new."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.instructions.generate import ONE_EACH, ONE_NEW_EACH, record, records
from examples.instructions.kinds import HELD_OUT, PAIRS_AND_TRIPLES, TRAINING, instruction
from examples.instructions.topics import FAMILIES
from spmd_rl.rewards.instructions.graders import ifeval
from tests.unit.rewards.cases import ask, say

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples/instructions"
PLAIN = (
    "The old man walked down to the sea, and he was happy to see the boats that came home. "
    "He said: IT IS a good day! Then he went back to the house with his dog. "
    "They had dinner there, and after that they sat by the fire for a very long time"
)
Arguments = dict[str, Any]


def words(text: str, given: Arguments) -> str:
    """Return the text shortened or repeated, as its number of words is to be."""
    if given["relation"] == "less than":
        return " ".join(text.split()[: given["num_words"] - 1])
    return " ".join(text.split() * 3)


def sentences(text: str, given: Arguments) -> str:
    return "This is one. " * (given["num_sentences"] - (given["relation"] == "less than"))


# what makes a text follow an instruction, in an order in which no step undoes one before it
FOLLOW: dict[str, Callable[[str, Arguments], str]] = {
    "length_constraints:number_words": words,
    "length_constraints:number_sentences": sentences,
    "keywords:existence": lambda text, given: f"{' '.join(given['keywords'])} {text}",
    "detectable_format:number_bullet_lists": (
        lambda text, given: text + "\n* one" * given["num_bullets"] + "\n"
    ),
    "detectable_format:title": lambda text, _: f"<<a title>>\n{text}",
    "detectable_format:number_highlighted_sections": (
        lambda text, given: f"{text} {'*a part* ' * given['num_highlights']}"
    ),
    "detectable_content:postscript": (
        lambda text, given: f"{text}\n\n{given['postscript_marker']} that is it"
    ),
    "startend:end_checker": lambda text, given: f"{text} {given['end_phrase']}",
    "punctuation:no_comma": lambda text, _: text.replace(",", ""),
    "change_case:english_lowercase": lambda text, _: text.lower(),
    "change_case:english_capital": lambda text, _: text.upper(),
    "startend:quotation": lambda text, _: f'"{text}"',
}
# texts that break one instruction, where the plain text does not
BREAK: dict[str, Callable[[Arguments], str]] = {
    "length_constraints:number_words": (
        lambda given: PLAIN * 3 if given["relation"] == "less than" else "too short"
    ),
    "length_constraints:number_sentences": (
        lambda given: "One more. " * 9 if given["relation"] == "less than" else "too short"
    ),
}


def followed(one: dict[str, Any]) -> str:
    """Return an answer that follows all instructions of a record; limits of words come first."""
    given = dict(zip(one["instruction_id_list"], one["kwargs"], strict=True))
    limits = given.get("length_constraints:number_words", {})
    text = PLAIN if limits.get("relation") != "less than" else "It is a day"
    for kind, follow in FOLLOW.items():
        if kind in given and not (kind.endswith("number_words") and text != PLAIN):
            text = follow(text, given[kind])
    return text


def grade(one: dict[str, Any], answer: str) -> dict[str, float]:
    meta = {key: one[key] for key in ("instruction_id_list", "kwargs")}
    return ifeval(ask(**meta), say(answer))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(found: list[dict[str, Any]]) -> list[str]:
    return [one["prompt"][0]["content"] for one in found]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    words = [f"--out={folder}", f"--train-out={folder}", "--num-train=600"]
    command = [sys.executable, "-m", "examples.instructions.generate", *words]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("kind", [*TRAINING, *HELD_OUT], ids=lambda kind: kind.name)
def test_each_kind_can_be_followed_and_broken(kind: Any) -> None:
    rng = random.Random(5)
    for _ in range(30):
        one = record("Tell me.", [instruction(kind, rng)], rng)
        assert grade(one, followed(one))["reward"] == 1, followed(one)
        broken = BREAK.get(kind.name, lambda _: PLAIN)(one["kwargs"][0])
        assert grade(one, broken)["reward"] == 0, broken


@pytest.mark.parametrize("kind", [*TRAINING, *HELD_OUT], ids=lambda kind: kind.name)
def test_a_prompt_tells_the_arguments_of_its_check(kind: Any) -> None:
    rng = random.Random(2)
    for _ in range(30):
        told = instruction(kind, rng)
        assert not re.search(r"[{}]", told.text)
        for value in told.arguments.values():
            for part in value if isinstance(value, list) else [value]:
                assert str(part) in told.text


@pytest.mark.parametrize("chosen", PAIRS_AND_TRIPLES, ids=len)
def test_several_instructions_can_be_followed_at_once(chosen: Any) -> None:
    (one,) = records([chosen], 1, random.Random(3), set(), held_out=False)
    assert sorted(one["instruction_id_list"]) == sorted(kind.name for kind in chosen)
    assert grade(one, followed(one))["reward"] == 1, followed(one)
    assert grade(one, PLAIN)["reward"] == 0


def test_the_same_seed_makes_the_same_prompts() -> None:
    def drawn(seed: int) -> list[dict[str, Any]]:
        return records(ONE_EACH, 50, random.Random(seed), set(), held_out=False)

    assert drawn(4) == drawn(4)
    assert drawn(4) != drawn(5)


def test_the_shipped_evaluations_are_the_generators(made: Path) -> None:
    for name in ("eval", "eval_kinds", "eval_two"):
        assert (made / f"{name}.jsonl").read_bytes() == (EXAMPLE / f"{name}.jsonl").read_bytes()


def test_no_prompt_is_in_two_files(made: Path) -> None:
    texts = [text for file in made.glob("*.jsonl") for text in asked(rows(file))]
    assert len(texts) == 2 * 600 + 3 * 140
    assert len({*texts}) == len(texts)


def test_held_out_subjects_and_kinds_are_not_trained_on(made: Path) -> None:
    held_out = [subject for family in FAMILIES for subject in family.held_out]
    names = re.compile(rf"\b(?:{'|'.join(held_out)})\b")
    training = [*rows(made / "train.jsonl"), *rows(made / "train_two.jsonl")]
    assert not any(map(names.search, asked(training)))
    for name in ("eval", "eval_kinds", "eval_two"):
        assert all(map(names.search, asked(rows(made / f"{name}.jsonl")))), "the control"
    trained = {kind for one in training for kind in one["instruction_id_list"]}
    new = {kind for one in rows(made / "eval_kinds.jsonl") for kind in one["instruction_id_list"]}
    assert trained == {kind.name for kind in TRAINING}
    assert new == {kind.name for (kind,) in ONE_NEW_EACH}
    assert not trained & new


def test_prompts_are_varied(made: Path) -> None:
    texts = asked(rows(made / "train.jsonl"))
    subjects = [subject for family in FAMILIES for subject in family.training]
    assert all(any(subject in text for text in texts) for subject in subjects)
    assert {len(one["kwargs"]) for one in rows(made / "train_two.jsonl")} == {2, 3}


def test_the_settings_differ_only_where_they_say_so() -> None:
    """Each job on GPUs learns from the same prompts with the same evaluations."""
    names = ("gpu", "two_gpus", "lora", "sglang", "megatron")
    settings = [tomllib.loads((EXAMPLE / f"{name}.toml").read_text()) for name in names]
    may_differ = ("run", "split", "engine", "trainer")
    shared = [{key: one[key] for key in one if key not in may_differ} for one in settings]
    assert all(one == shared[0] for one in shared)
    assert len({one["run"]["name"] for one in settings}) == len(names)
