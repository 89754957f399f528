"""Tokenizer files drawn at random, beside a config.json of each family."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests.unit.model.drawn import write

MODEL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

ADDED = {
    "__type": "AddedToken",
    "content": "<|bos|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
}


def draw_tokenizer(seed: int, folder: Path) -> None:
    """Write the folder of a seed: byte-level BPE as a transformers class would make it, or not."""
    draw = random.Random(f"tokenizer {seed}")
    folder.mkdir(parents=True)
    write(folder / "config.json", MODEL | {"model_type": draw.choice(["llama", "qwen2", "qwen3"])})
    rust = _rust(draw)
    rust.save(str(folder / "tokenizer.json"))
    if draw.random() < 0.9:
        listed = {"added_tokens_decoder": _listed(draw, rust)} if draw.random() < 0.4 else {}
        write(folder / "tokenizer_config.json", _settings(draw) | listed)
    if draw.random() < 0.15:
        write(
            folder / "special_tokens_map.json",
            {"eos_token": "<|endoftext|>", "pad_token": "<|new|>"},
        )
    if draw.random() < 0.15:
        write(folder / "added_tokens.json", {"<|new|>": 266})
    if draw.random() < 0.4:
        _save_after_a_call(draw, folder)


def _rust(draw: random.Random) -> Tokenizer:
    alphabet = list(bytes_to_unicode().values())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2")]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    rust = Tokenizer(models.BPE(vocab, merges))
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    usual, other = (
        pre_tokenizers.Sequence([split, byte_level]),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
    )
    rust.normalizer = draw.choice([normalizers.NFC()] * 4 + [normalizers.Lowercase(), None])
    rust.pre_tokenizer = draw.choice([usual] * 4 + [other])
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|endoftext|>", "<|im_end|>", "<|bos|>"])
    rust.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if draw.random() < 0.4:
        bos = ("<|bos|>", rust.get_vocab()["<|bos|>"])
        rust.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[bos])
    return rust


def _listed(draw: random.Random, rust: Tokenizer) -> dict[str, Any]:
    """Return the added tokens as transformers 4 repeats them in its config, perhaps edited."""
    facts = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    listed = {
        str(index): {key: getattr(token, key) for key in facts}
        for index, token in rust.get_added_tokens_decoder().items()
    }
    last = str(rust.get_vocab_size() - 1)
    edited = draw.random()
    if edited < 0.1:
        listed[str(rust.get_vocab_size())] = listed[last] | {"content": "<|more|>"}
    elif edited < 0.2:
        listed[last] = listed[last] | {"lstrip": True}
    elif edited < 0.3:
        del listed[last]
    return listed


def _settings(draw: random.Random) -> dict[str, Any]:
    optional: dict[str, list[Any]] = {
        "tokenizer_class": [
            "PreTrainedTokenizerFast",
            "Qwen2Tokenizer",
            "Qwen2TokenizerFast",
            "TokenizersBackend",
        ],
        "bos_token": ["<|bos|>", None],
        "pad_token": ["<|endoftext|>", "<|endoftext|>", "<|pad|>", None],
        "unk_token": [None],
        "add_bos_token": [True, False],
        "add_eos_token": [True, False],
        "clean_up_tokenization_spaces": [True, False],
        "model_max_length": [8, 4096],
        "padding_side": ["left"],
        "additional_special_tokens": [["<|im_end|>"], []],
        "legacy": [True],
    }
    rare: dict[str, list[Any]] = {
        "split_special_tokens": [True],
        "add_prefix_space": [True],
        "extra_special_tokens": [["<think>"], ["<|more|>"], {"image_token": "<|more|>"}],
        "mask_token": ["<|mask|>"],
        "tokenizer_class": ["LlamaTokenizer"],
    }
    settings: dict[str, Any] = {"eos_token": draw.choice(["<|im_end|>"] * 4 + [ADDED, "<|new|>"])}
    settings |= {
        key: draw.choice(values) for key, values in optional.items() if draw.random() < 0.4
    }
    settings |= {key: draw.choice(values) for key, values in rare.items() if draw.random() < 0.06}
    return settings


def _save_after_a_call(draw: random.Random, folder: Path) -> None:
    """Save a tokenizer with the truncation and padding of its last call."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or "<|endoftext|>"
    settings = [
        {"truncation": True},
        {"padding": "max_length"},
        {"truncation": True, "padding": "max_length"},
    ]
    tokenizer(["hello", "hello world 12"], max_length=6, **draw.choice(settings))
    tokenizer.save_pretrained(folder)
