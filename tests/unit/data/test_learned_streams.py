"""Supervised data, preference pairs and documents: mixtures, slices and large files alike."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from spmd_rl.data.documents import DocumentConfig, Documents
from spmd_rl.data.files import record_store
from spmd_rl.data.pairs import PairConfig, PreferencePairs
from spmd_rl.data.prompts import PromptConfig
from spmd_rl.data.sft import SftPairs
from spmd_rl.errors import DataError
from tests.unit.data.chat_templates import QWEN, tokenizer_of

Stream = SftPairs | PreferencePairs | Documents
Make = Callable[..., Stream]


def answers(data: Any, tokenizer: Any, **settings: Any) -> SftPairs:
    return SftPairs(data, PromptConfig(**settings), tokenizer)


def conversations(data: Any, tokenizer: Any, **settings: Any) -> SftPairs:
    cfg = PromptConfig(chat_template=True, prompt_key="messages", answer_key="", **settings)
    return SftPairs(data, cfg, tokenizer_of(QWEN))


def pairs(data: Any, tokenizer: Any, **settings: Any) -> PreferencePairs:
    return PreferencePairs(data, PairConfig(**settings), tokenizer)


def documents(data: Any, tokenizer: Any, **settings: Any) -> Documents:
    return Documents(data, DocumentConfig(**settings), tokenizer)


MAKES = pytest.mark.parametrize("make", [answers, conversations, pairs, documents])


def line(text: str) -> str:
    """A record that each of the streams can read."""
    turns = [("user", text), ("assistant", "a"), ("user", "r"), ("assistant", text)]
    return json.dumps(
        {
            "prompt": text,
            "answer": text,
            "chosen": text,
            "rejected": "no",
            "text": text,
            "messages": [{"role": role, "content": content} for role, content in turns],
        }
    )


def drawn(stream: Stream, num: int) -> list[Any]:
    """The next records as plain data; of documents, as many steps of 7 tokens."""
    if isinstance(stream, Documents):
        return [plain(stream.next(7)) for _ in range(num)]
    return [plain(stream.next(1)) for _ in range(num)]


def plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is a large one, of which three records are prepared at the start."""
    monkeypatch.setattr(record_store, "SMALL_BYTES", 0)
    monkeypatch.setattr(record_store, "FIRST", 3)


@pytest.fixture
def path(jsonl: Callable[..., str]) -> str:
    return jsonl(*(line(f"text {i}") for i in range(10)))


@MAKES
@pytest.mark.parametrize("end", ["", "@[2:7]"])
def test_a_large_file_is_drawn_as_a_small_one(
    make: Make, end: str, path: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make(path + end, tokenizer)
    monkeypatch.setattr(record_store, "SMALL_RECORDS", 0)
    monkeypatch.setattr(record_store, "FIRST", 3)
    large = make(path + end, tokenizer)
    assert len(small) == len(large) == (5 if end else 10)
    assert drawn(small, 25) == drawn(large, 25)


@MAKES
@pytest.mark.usefixtures("large")
def test_only_what_is_drawn_is_prepared(make: Make, jsonl: Any, tokenizer: Any) -> None:
    whole = [line(f"text {i}") for i in range(5)]
    stream = make(jsonl(*whole, "broken", *whole), tokenizer, shuffle=False)
    for _ in range(5):  # a document has 6 letters, a BOS and an end
        assert stream.next(8 if isinstance(stream, Documents) else 1)
    with pytest.raises(DataError, match=r"train\.jsonl:6: not valid JSON"):
        stream.next(1)
    with pytest.raises(DataError, match=r"first\.jsonl:2: not valid JSON"):
        make(jsonl(line("x"), "broken", name="first.jsonl"), tokenizer)


@MAKES
@pytest.mark.usefixtures("large")
def test_a_large_mixture_resumes_at_the_same_record(
    make: Make, path: str, jsonl: Any, tokenizer: Any
) -> None:
    other = jsonl(*(line(f"other {i}") for i in range(4)), name="other.jsonl")
    whole, resumed = (make({path: 3, f"{other}@[1:]": 1}, tokenizer) for _ in range(2))
    assert len(whole) == 13
    drawn(whole, 17)
    resumed.restore(json.loads(json.dumps(whole.state())))
    assert drawn(whole, 20) == drawn(resumed, 20)
    changed = jsonl(*(line(f"other {i}!") for i in range(4)), name="other.jsonl")
    with pytest.raises(
        DataError, match=r"train.jsonl, .*other.jsonl.* not those of the checkpoint"
    ):
        make({path: 3, f"{changed}@[1:]": 1}, tokenizer).restore(whole.state())


@MAKES
def test_a_mixture_has_its_shares_and_names(
    make: Make, path: str, jsonl: Any, tokenizer: Any
) -> None:
    other = jsonl(line("other 0"), name="other.jsonl")
    stream = make({path: 3, other: 1}, tokenizer)
    if isinstance(stream, Documents):
        # one document a step: "text 1" has 6 letters, "other 0" 7, each a BOS and an end
        found: Counter[str] = Counter()
        while sum(found.values()) < 40:
            (piece,) = stream.next(8)
            found[piece.source] += 1
            stream.next(1) if piece.source == "other" else None
    elif isinstance(stream, SftPairs):
        found = Counter(stream.next(1)[0].source for _ in range(40))
    else:
        found = Counter(stream.next(1)[0].chosen.source for _ in range(40))
    assert abs(found["train"] - 30) <= 2
    assert found["train"] + found["other"] == 40


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("make", [answers, pairs, conversations])
def test_long_prompts_of_a_large_file_are_dropped_when_drawn(
    make: Make, jsonl: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(*(line("x" * (2 + 50 * (i == 4))) for i in range(6)))
    limit = 60 if make is conversations else 10
    stream = make(path, tokenizer, max_prompt_tokens=limit, shuffle=False)
    assert stream.num_dropped == 0
    assert len(drawn(stream, 10)) == 10
    assert stream.num_dropped == 1
    assert "are dropped when drawn" in capsys.readouterr().out
    assert isinstance(stream, (SftPairs, PreferencePairs))
    assert len(stream.all()) == 5, "every record once"


@pytest.mark.usefixtures("large")
def test_documents_without_text_are_dropped_when_drawn(
    jsonl: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": text}) for text in ("a", "b", "c", " ", "e")]
    path = jsonl(*rows)
    stream, resumed = (documents(path, tokenizer, shuffle=False) for _ in range(2))
    texts = "".join(chr(t) for piece in stream.next(15) for t in piece.tokens if t > 2)
    assert (texts, stream.num_dropped, stream.num_drawn) == ("abcea", 1, 6)
    assert "documents that have no text are dropped when drawn" in capsys.readouterr().out
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert plain(resumed.next(20)) == plain(stream.next(20))
