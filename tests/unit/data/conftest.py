from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


class CharTokenizer:
    """A character a token; BOS (1) in front when special tokens are asked for."""

    eos_token_id: int | None = 2
    config_eos_ids: tuple[int, ...] = (2,)
    context = 4096
    chat_template: str | None = "{{ messages }}{{ tools }}{{ thinking }}"

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * add_special_tokens + [ord(c) for c in line] for line in text]}

    def num_tokens(self, text: str) -> int:
        return len(text) + 1

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        ending = "<assistant>" if kwargs.pop("add_generation_prompt") else ""
        turns = "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation)
        return turns + ending + "".join(f"[{key}={value}]" for key, value in kwargs.items())


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(*lines: str, name: str = "train.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        return str(path)

    return write
