"""Writes the data of this example: a corpus of facts about people, and questions over two of them.

    python -m examples.search.generate

`corpus.jsonl` holds the documents, each one sentence. `train.jsonl` and `eval.jsonl` hold questions
about different people, with their answers. `warmup.jsonl` holds what a careless teacher writes in
each turn of other questions. It searches for the wrong name, or guesses. `model/` is a model
without weights: its config, and a tokenizer with a token for each letter and each tag.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

QUESTION = "where does the boss of {} live?"
BOSS_QUERY, HOME_QUERY = "boss of {}", "home of {}"
BOSS_FACTS = ("{a} works for {b}.", "{a} is employed by {b}.", "{a} reports to {b}.")
HOME_FACTS = ("{a} lives in {b}.", "{a} dwells in {b}.", "{a} has settled in {b}.")
SEARCH, FOUND, ANSWER = "<search>{}</search>", "<doc>{}</doc>", "<answer>{}</answer>"
TAGS = ("<search>", "</search>", "<doc>", "</doc>", "<answer>", "</answer>")
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 104,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}


@dataclass(frozen=True)
class Person:
    """Someone in the corpus, whom they work for and where they live."""

    name: str
    boss: str
    town: str


def names(count: int, rng: random.Random) -> list[str]:
    """Return different names of five letters, such as "tomak"."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choice(CONSONANTS if i % 2 == 0 else VOWELS) for i in range(5))] = None
    return list(found)


def people(count: int, num_towns: int, rng: random.Random) -> list[Person]:
    """Return people, each with a boss among the others."""
    drawn = names(count + num_towns, rng)
    own, towns = drawn[:count], drawn[count:]
    bosses = {name: rng.choice([other for other in own if other != name]) for name in own}
    return [Person(name, bosses[name], rng.choice(towns)) for name in own]


def documents(everyone: Iterable[Person], rng: random.Random) -> list[str]:
    """Return two facts about each person, in varying words and in random order."""
    facts = []
    for one in everyone:
        facts.append(rng.choice(BOSS_FACTS).format(a=one.name, b=one.boss))
        facts.append(rng.choice(HOME_FACTS).format(a=one.name, b=one.town))
    rng.shuffle(facts)
    return facts


def question(one: Person, town_of: dict[str, str]) -> dict[str, str]:
    return {"prompt": QUESTION.format(one.name), "answer": town_of[one.boss]}


def turns(
    one: Person, everyone: Sequence[Person], facts: dict[str, str], care: float, rng: random.Random
) -> Iterator[dict[str, str]]:
    """Yield the teacher's turns on a question: two searches and the answer, or a guess."""
    prompt = QUESTION.format(one.name)
    town_of = {other.name: other.town for other in everyone}
    if rng.random() >= care:
        yield {"prompt": prompt, "answer": ANSWER.format(rng.choice(everyone).town)}
        return
    for query, right in ((BOSS_QUERY, one.name), (HOME_QUERY, one.boss)):
        name = right if rng.random() < care else rng.choice(everyone).name
        written = SEARCH.format(query.format(name))
        yield {"prompt": prompt, "answer": written}
        prompt += written + FOUND.format(facts[query.format(name)])
    yield {"prompt": prompt, "answer": ANSWER.format(town_of[name])}


def facts_by_query(everyone: Iterable[Person], rng: random.Random) -> dict[str, str]:
    """Return the document that each query is about."""
    facts = {}
    for one in everyone:
        facts[BOSS_QUERY.format(one.name)] = rng.choice(BOSS_FACTS).format(a=one.name, b=one.boss)
        facts[HOME_QUERY.format(one.name)] = rng.choice(HOME_FACTS).format(a=one.name, b=one.town)
    return facts


def tokenizer() -> dict[str, object]:
    """Return the contents of tokenizer.json: a token a letter, and one a tag."""
    ends = ("<|pad|>", "<|end|>")
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = [*ends, *letters, *TAGS]
    added = [
        {
            "id": vocabulary.index(text),
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": text in ends,
        }
        for text in (*ends, *TAGS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(vocabulary)},
            "merges": [],
        },
    }


def write_model(folder: Path) -> None:
    """Write a model folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "model_max_length": MODEL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("config.json", MODEL),
        ("generation_config.json", {"eos_token_id": 1, "pad_token_id": 0}),
        ("tokenizer.json", tokenizer()),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write(path: Path, records: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-people", type=int, default=400, help="that the corpus is about")
    parser.add_argument("--num-towns", type=int, default=60)
    parser.add_argument("--num-eval", type=int, default=100, help="people of the evaluation")
    parser.add_argument("--num-lessons", type=int, default=900, help="questions of the teacher")
    parser.add_argument(
        "--care", type=float, default=0.8, help="chance that a turn of the teacher is right"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()

    rng = random.Random(args.seed)
    everyone = people(args.num_people, args.num_towns, rng)
    town_of = {one.name: one.town for one in everyone}
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "corpus.jsonl", ({"text": text} for text in documents(everyone, rng)))
    held_out, asked = everyone[: args.num_eval], everyone[args.num_eval :]
    write(args.out / "eval.jsonl", (question(one, town_of) for one in held_out))
    write(args.out / "train.jsonl", (question(one, town_of) for one in asked))
    # the teacher speaks of people who are in no document, so nothing can be learned by heart
    others = people(args.num_lessons, args.num_towns, rng)
    facts = facts_by_query(others, rng)
    lessons = (turn for one in others for turn in turns(one, others, facts, args.care, rng))
    write(args.out / "warmup.jsonl", lessons)
    write_model(args.out / "model")


if __name__ == "__main__":
    main()
