"""Rules by which transformers' tokenizer of a folder is its tokenizer.json as written.

transformers may build another tokenizer from the vocabulary, as the tokenizer's class says, and add
tokens that other files name. Where a rule here is not met, transformers itself is asked.
Source: transformers 5.17, AutoTokenizer, TokenizersBackend and Qwen2Tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PLAIN = {"PreTrainedTokenizer", "TokenizersBackend"}
QWEN2 = "Qwen2Tokenizer"
QWEN2_SPECIAL = {
    "unk_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
QWEN2_MODEL = {
    "dropout": None,
    "unk_token": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
QWEN2_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PARTS: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": QWEN2_SPLIT},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    },
    "decoder": {"type": "ByteLevel"},
}
DECODER_IGNORES = {"add_prefix_space", "use_regex"}
TOKEN_LISTS = ("extra_special_tokens", "additional_special_tokens")
# read where the config lists no added tokens
LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
FORCED_CLEAN_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
UNSUPPORTED_SETTINGS = (
    "auto_map",
    "split_special_tokens",
    "fix_mistral_regex",
    "init_inputs",
    FORCED_CLEAN_UP,
)


def is_as_written(
    rust: Any, model: Mapping[str, Any], config: Mapping[str, Any], files: set[str]
) -> bool:
    """Return whether transformers would make the tokenizer that `tokenizers` reads.

    `rust` is the tokenizer.json as `tokenizers` reads it; `model` and `config` are config.json and
    tokenizer_config.json.
    """
    name = _class(model, config)
    added = {index: _facts(token) for index, token in rust.get_added_tokens_decoder().items()}
    listed = config.get("added_tokens_decoder")
    special = {facts["content"] for facts in added.values() if facts["special"]}
    return (
        (name in PLAIN or (name == QWEN2 and _is_qwen2(rust, config)))
        and not any(config.get(key) for key in UNSUPPORTED_SETTINGS)
        and not (config.get("clean_up_tokenization_spaces") and type(rust.model).__name__ != "BPE")
        and (not files & set(LEGACY_FILES) if listed is None else _same_tokens(listed, added))
        and all(
            isinstance(token, str) and token in special
            for token in _special_tokens(rust, name, config)
        )
    )


def _class(model: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the class that AutoTokenizer takes, by the family and the class in the configs."""
    family, named = (
        model.get("model_type"),
        config.get("tokenizer_class") or model.get("tokenizer_class"),
    )
    if family == "qwen2" or (family == "qwen3" and named is None):
        return QWEN2
    return "TokenizersBackend" if named is None else str(named).removesuffix("Fast")


def _is_qwen2(rust: Any, config: Mapping[str, Any]) -> bool:
    """Return whether Qwen2Tokenizer would build this very tokenizer from the vocabulary."""
    return (
        type(rust.model).__name__ == "BPE"
        and all(getattr(rust.model, key) == value for key, value in QWEN2_MODEL.items())
        and not any(getattr(rust.model, key) for key in QWEN2_AFFIXES)
        and all(_part(getattr(rust, name), name) == part for name, part in QWEN2_PARTS.items())
        and "eos_token" in config
        and not config.get("add_prefix_space")
    )


def _part(part: Any, name: str) -> Any:
    """Return a part of the tokenizer as JSON, without keys that cannot change ids or text."""
    ignored = {"trim_offsets"} | (DECODER_IGNORES if name == "decoder" else set())

    def useful(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if key not in ignored}

    return None if part is None else json.loads(part.__getstate__(), object_pairs_hook=useful)


def _facts(token: Any) -> dict[str, Any]:
    """Return an added token as a config lists it."""
    return {
        key: getattr(token, key)
        for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    }


def _same_tokens(listed: Any, added: Mapping[int, dict[str, Any]]) -> bool:
    return isinstance(listed, dict) and listed == {
        str(index): facts for index, facts in added.items()
    }


def _special_tokens(rust: Any, name: str, config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every token that transformers would add to the vocabulary if it were missing."""
    named = _named_tokens(name, config)
    yield from (_content(value) for value in named.values() if value is not None)
    for key in TOKEN_LISTS:
        found = config.get(key) or []
        found = found.values() if isinstance(found, dict) else found
        yield from map(_content, found) if isinstance(found, Iterable) else [None]
    if rust.padding is not None:
        yield rust.padding["pad_token"]


def _named_tokens(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that name one token each, such as eos_token, with their defaults."""
    named = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and not isinstance(value, bool)
    }
    return QWEN2_SPECIAL | named if name == QWEN2 else named


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) and "__type" in token else token
