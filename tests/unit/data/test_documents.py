"""Documents for continued pre-training: every token is learned once, across cuts and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmd_rl.algo.packing import pack_sft
from spmd_rl.data.documents import DocumentConfig, Documents
from spmd_rl.errors import ConfigError, DataError

TEXTS = ["a", "bcdefghij", "kl", "", "mnopqrstuvwxyz"]
BOS, EOS = 1, 2


@pytest.fixture
def path(jsonl: Callable[..., str]) -> str:
    return jsonl(*(json.dumps({"text": text}) for text in TEXTS))


def in_order(max_tokens: int) -> DocumentConfig:
    return DocumentConfig(shuffle=False, max_tokens=max_tokens)


def learned(pieces: Any) -> list[int]:
    return [int(token) for piece in pieces for token in piece.tokens[piece.mask]]


def expected() -> list[int]:
    return [token for text in TEXTS if text for token in (*map(ord, text), EOS)]


@pytest.mark.parametrize("max_tokens", [2, 3, 5, 100])
@pytest.mark.parametrize("step_tokens", [1, 4, 7, 34])
def test_every_token_is_learned_once(
    path: str, tokenizer: Any, max_tokens: int, step_tokens: int
) -> None:
    documents = Documents(path, in_order(max_tokens), tokenizer)
    steps = [documents.next(step_tokens) for _ in range(34 * 2)]
    pieces = [piece for step in steps for piece in step]
    assert max(len(piece.tokens) for piece in pieces) <= max_tokens
    num_epochs = 34 * 2 * step_tokens // 34  # 30 letters and ends, and a BOS for each of 4 texts
    assert learned(pieces) == expected() * num_epochs
    assert documents.epoch == num_epochs


def test_a_piece_after_a_cut_sees_the_token_before_it(path: str, tokenizer: Any) -> None:
    documents = Documents(path, in_order(4), tokenizer)
    texts = [piece.tokens.tolist() for piece in documents.next(14)]
    assert texts == [
        [BOS, ord("a"), EOS],
        [BOS, *map(ord, "bcd")],
        [*map(ord, "defg")],
        [*map(ord, "ghij")],
        [ord("j"), EOS],
    ]


def test_a_step_has_its_exact_number_of_new_tokens(path: str, tokenizer: Any) -> None:
    documents = Documents(path, in_order(100), tokenizer)
    first, second = documents.next(5), documents.next(5)
    assert [len(piece.tokens) for piece in first] == [3, 2]
    assert [len(piece.tokens) for piece in second] == [6]
    assert second[0].tokens[0] == first[-1].tokens[-1]


def test_ragged_pieces_are_packed(path: str, tokenizer: Any) -> None:
    pieces = Documents(path, in_order(5), tokenizer).next(34)
    batch = pack_sft(pieces)
    assert batch.lengths.tolist() == [len(piece.tokens) for piece in pieces]
    assert batch.tokens[batch.mask].tolist() == expected()
    assert batch.denominator == len(expected())
    # each sequence has positions of its own, so that documents never attend to each other
    assert not batch.mask[np.cumsum(batch.lengths) - batch.lengths].any()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_a_resumed_stream_goes_on_within_a_document(
    path: str, tokenizer: Any, num_steps: int
) -> None:
    whole, resumed = (Documents(path, DocumentConfig(), tokenizer) for _ in range(2))
    for _ in range(num_steps):
        whole.next(7)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert learned(whole.next(50)) == learned(resumed.next(50))


def test_other_documents_or_tokens_are_refused(
    path: str, tokenizer: Any, jsonl: Callable[..., str]
) -> None:
    documents = Documents(path, in_order(5), tokenizer)
    documents.next(4)
    state = documents.state()
    other = jsonl(*(json.dumps({"text": text + "!"}) for text in TEXTS), name="other.jsonl")
    with pytest.raises(DataError, match="documents are not those of the checkpoint"):
        Documents(other, in_order(5), tokenizer).restore(state)
    with pytest.raises(DataError, match="documents are not those of the checkpoint"):
        Documents(path, in_order(5), tokenizer).restore(state | {"length": 3})


def test_a_text_file_is_split(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\nline\n\n\n\ntwo\n")
    split = Documents(str(file), in_order(100), tokenizer)
    assert [bytes(t for t in piece.tokens if t > 2) for piece in split.next(15)] == [
        b"one\nline",
        b"two",
    ]
    assert len(Documents(str(file), DocumentConfig(separator=""), tokenizer)) == 1
    assert len(Documents(f"{file}@[1:]", DocumentConfig(), tokenizer)) == 1


def test_what_is_refused(path: str, jsonl: Callable[..., str], tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="documents.max_tokens = 5000 is more than"):
        Documents(path, DocumentConfig(max_tokens=5000), tokenizer)
    with pytest.raises(DataError, match="all 1 documents have no text"):
        Documents(jsonl('{"text": " "}'), DocumentConfig(), tokenizer)
    with pytest.raises(DataError, match="no such key"):
        Documents(path, DocumentConfig(text_key="content"), tokenizer)
