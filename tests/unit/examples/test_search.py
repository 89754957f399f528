"""The search example: its data is what its generator makes, and its hooks do what its page says."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.search.generate import TAGS, facts_by_query, people
from examples.search.hooks import MAX_TURNS, right
from examples.search.retriever import ENCODER, Retriever, read_corpus, share_found, train
from spmd_rl.hooks.config import HookConfig
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.rank.pool import HookPool
from spmd_rl.hooks.rank.tasks import EngineCall, EpisodeTask
from spmd_rl.hooks.transcript import Turn
from spmd_rl.model.tokenizer import load_tokenizer
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from tests.unit.hooks.cases import CharTokenizer, events_of

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "search"
FILES = ("corpus.jsonl", "train.jsonl", "eval.jsonl", "warmup.jsonl", "model/tokenizer.json")


@pytest.fixture(scope="module")
def retriever() -> Retriever:
    return Retriever(train(num_steps=80), read_corpus())


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def found(retriever: Retriever, query: str) -> str:
    """Return the last word of the document that is found."""
    return retriever.find(query).rstrip(".").split()[-1]


def test_the_shipped_files_are_the_generators(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.search.generate", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


def test_two_searches_answer_the_questions(retriever: Retriever) -> None:
    questions = [*rows("train"), *rows("eval")]
    assert len({row["prompt"] for row in questions}) == len(questions)
    answered = []
    for row in questions:
        boss = found(retriever, f"boss of {row['prompt'].split()[5]}")
        answered.append(found(retriever, f"home of {boss}") == row["answer"])
    assert np.mean(answered) > 0.97


def test_the_corpus_is_new_to_the_encoder_and_to_the_teacher(retriever: Retriever) -> None:
    taught = " ".join(row["prompt"] for row in rows("warmup"))
    names = {row["prompt"].split()[5] for row in rows("train")}
    assert sum(name in taught for name in names) < len(names) / 4
    rng = random.Random(5)
    facts = facts_by_query(people(200, 60, rng), rng)
    untrained = Retriever(np.random.default_rng(0).normal(size=(2, 4096, 96)), [*facts.values()])
    assert share_found(untrained, facts) < 0.1


def test_a_tag_is_one_token() -> None:
    tokenizer = load_tokenizer(str(EXAMPLE / "model"))
    (tokens,) = tokenizer(["".join(TAGS)], add_special_tokens=False)["input_ids"]
    assert len(tokens) == len(TAGS)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "".join(TAGS)


def played(retriever: Retriever, folder: Path, *said: str) -> Sample:
    """Play an episode in a process of hooks; the engine of this test says these turns."""
    calls: list[EngineCall] = []

    def answer(call: EngineCall) -> None:
        text = said[len(calls)]
        tokens = np.array([*map(ord, text)], np.int32)
        logprobs, versions = np.full(len(text), -0.5, np.float32), np.full(len(text), 4, np.int32)
        calls.append(call)
        pool.reply(call.task_id, call.call_id, Turn(tokens, logprobs, versions, text, "completed"))

    weights = np.stack([retriever.query_weight, retriever.document_weight])
    (folder / ENCODER).parent.mkdir()
    np.savez(folder / ENCODER, weights=weights)
    prompt = Prompt(3, np.array([1], np.int32), text=rows("eval")[0]["prompt"])
    cfg = HookConfig(generate=f"{EXAMPLE / 'hooks.py'}:solve")
    with HookPool(cfg, tokenizer=CharTokenizer) as pool:
        task = pool.submit(EpisodeTask(prompt, 0, 1, 1.0, CallInfo()))
        event: Any = events_of(pool, answer)[task]
    (sample,) = event.samples
    return sample.replace(text="".join(map(chr, sample.tokens)))


def test_an_episode_shows_what_was_found_and_learns_what_was_said(
    retriever: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = rows("eval")[0]
    name = row["prompt"].split()[5]
    boss = found(retriever, f"boss of {name}")
    queries = f"boss of {name}", f"home of {boss}"
    said = [
        *(f"<search>{query}</search>" for query in queries),
        f"<answer>{row['answer']}</answer>",
    ]
    sample = played(retriever, tmp_path, *said)
    first, second = (f"<doc>{retriever.find(query)}</doc>" for query in queries)
    assert sample.text == said[0] + first + said[1] + second + said[2]
    assert "".join(chr(token) for token in sample.tokens[sample.mask]) == "".join(said)
    prompt = Prompt(3, np.array([1], np.int32), answer=row["answer"])
    assert right(prompt, sample) == {"reward": 1.0, "searches": 2.0}
    for text in (said[0], said[2] + "x", "<answer>nowhere</answer>", first + "<answer></answer>"):
        assert right(prompt, sample.replace(text=text))["reward"] == 0.0


def test_searches_without_end_are_stopped(
    retriever: Retriever, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sample = played(retriever, tmp_path, *["<search>x</search>"] * MAX_TURNS)
    assert sample.text.count("<doc>") == MAX_TURNS


def test_without_the_encoder_the_episode_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"python -m examples\.search\.retriever"):
        Retriever.load()
