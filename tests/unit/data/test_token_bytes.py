"""Bytes of tokens: joined, they are those of the text, wherever a character is split."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spmd_rl.data.render.token_bytes import TokenBytes

SPACE = "\u2581"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = Tokenizer(models.BPE({one: place for place, one in enumerate(letters)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    return rust


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma have it: letters, and bytes for what has no letter."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *"abcd", SPACE, "<unk>"]
    vocab = {name: place for place, name in enumerate(names)}
    rust = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence(steps)
    return rust


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@given(text=st.text("ab é\u20ac\U0001f600\n", max_size=9))
def test_bytes_of_tokens_are_those_of_the_text(make: Any, text: str) -> None:
    rust = make()
    rust.add_special_tokens(["<|end|>"])
    rust.add_tokens([AddedToken("é€", special=False, normalized=False)])
    found, ids = TokenBytes(rust), rust.encode(text + "<|end|>").ids
    assert b"".join(map(found.of, ids)) == (text + "<|end|>").encode()
    assert found.of(10**6) == b""
    if "\U0001f600" in text:
        assert {b"\xf0", b"\x9f", b"\x98", b"\x80"} <= set(map(found.of, ids))


def test_a_decoder_of_another_kind_shows_its_texts() -> None:
    rust = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    assert [TokenBytes(rust).of(token) for token in range(2)] == [b"a", b"##b"]
