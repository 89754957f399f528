"""Tokenizers of model folders.

A folder with a tokenizer.json is read by the `tokenizers` library alone, in milliseconds.
transformers' tokenizers take seconds to import. They are asked only for what they alone can do:
other tokenizer files, files of which transformers makes another tokenizer than is written there,
and chat templates that name special tokens which the config lacks.
Source: transformers 5.17, `PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.model.foreign.names import folder_of
from spmd_rl.model.json_fields import read_object
from spmd_rl.model.read import model_folder, read_spec
from spmd_rl.model.tokenizer_rules import is_as_written

_NAMED_TOKEN = re.compile(r"\b(\w+_token)\b")
VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken")


class FolderTokenizer:
    """The part of transformers' tokenizer interface that this package uses, with equal results."""

    def __init__(self, model: str | Path, rust: Any, config: dict[str, Any]) -> None:
        self.model = model
        self.folder = folder_of(model)
        self._rust = rust
        self._config = config
        rust.no_truncation()  # a file stores the settings of the last call before it was saved
        rust.no_padding()

    @cached_property
    def context(self) -> int:
        """Positions of the folder's model."""
        return read_spec(self.model).max_positions

    @cached_property
    def config_eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text by the model's config, whatever the tokenizer says."""
        return read_spec(self.model).eos_ids

    @cached_property
    def eos_token_id(self) -> int | None:
        name = self._config.get("eos_token")
        text = name.get("content") if isinstance(name, dict) else name
        return None if text is None else self._rust.token_to_id(text)

    @cached_property
    def chat_template(self) -> Any:
        """The text of the template, or several texts by name; None without any."""
        file = self.folder / "chat_template.jinja"
        others = sorted(self.folder.glob("additional_chat_templates/*.jinja"))
        files = {"default": file} if file.is_file() else {}
        named = files | {one.stem: one for one in others}
        texts = {name: one.read_text(encoding="utf-8") for name, one in named.items()}
        if not texts:
            return self._config.get("chat_template")
        return texts if others else texts["default"]

    def __call__(
        self, text: list[str], *, add_special_tokens: bool = True
    ) -> dict[str, list[list[int]]]:
        encodings = self._rust.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token, special ones included."""
        return dict(self._rust.get_vocab(with_added_tokens=True))

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the `tokenizers` library."""
        return self._rust

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text with its special ones, in this thread alone.

        So a process that forks may call it.
        """
        return len(self._rust.encode(text).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool = True, **kwargs: Any
    ) -> Any:
        template = _chosen_template(self.chat_template, kwargs.get("tools"))
        tokens = None if template is None else _named_tokens(template, self._config)
        if template is None or tokens is None or tokenize or not conversation:
            return self._whole.apply_chat_template(conversation, tokenize=tokenize, **kwargs)
        return _render_template(template, tokens, conversation, **kwargs)

    @cached_property
    def _whole(self) -> Any:
        return _auto_tokenizer(self.folder)


def load_tokenizer(folder: str | Path) -> FolderTokenizer:
    """Load the tokenizer of a model folder, without running its code or downloading anything.

    Raises: ConfigError if the folder holds none that loads.
    """
    path = model_folder(folder)
    check_has_tokenizer(path)
    if (light := light_tokenizer(folder)) is not None:
        return light
    spec = read_spec(folder)
    tokenizer: FolderTokenizer = _auto_tokenizer(path)
    tokenizer.context, tokenizer.config_eos_ids = spec.max_positions, spec.eos_ids
    return tokenizer


def light_tokenizer(model: str | Path) -> FolderTokenizer | None:
    """Load the tokenizer.json of a model's folder.

    Returns None where there is none, or where transformers makes another tokenizer of it.
    Raises: ConfigError if the file does not load.
    """
    from tokenizers import Tokenizer

    folder = folder_of(model)
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    config = _read_if_there(folder / "tokenizer_config.json")
    try:
        rust = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust library raises plain Exception for any broken file
        raise ConfigError(f"{file} does not load: {error}") from error
    files = {path.name for path in folder.iterdir()}
    as_written = is_as_written(rust, _read_if_there(folder / "config.json"), config, files)
    return FolderTokenizer(model, rust, config) if as_written else None


def has_tokenizer(folder: str | Path) -> bool:
    """Return whether the folder has a file with a vocabulary."""
    return any(found for pattern in VOCABULARIES for found in folder_of(folder).glob(pattern))


def check_has_tokenizer(folder: str | Path) -> None:
    """Raise ConfigError when the folder has no vocabulary: transformers would invent one."""
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder} holds no tokenizer: "
            "there is no tokenizer.json, nor any other file with a vocabulary"
        )


def _auto_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    # transformers raises many kinds for a missing or broken file; all mean the same here
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            f"{folder} holds no tokenizer that loads: {type(error).__name__}: {message}"
        ) from error


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _chosen_template(templates: Any, tools: Any) -> str | None:
    """Return the template for these tools, of one text or of several by name."""
    if not isinstance(templates, Mapping):
        return templates
    return templates.get("tool_use" if tools is not None and "tool_use" in templates else "default")


def _named_tokens(template: str, config: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the special tokens that a template names, as the tokenizer's config writes them.

    Returns None where the config lacks one of them.
    """
    texts = {}
    for name in set(_NAMED_TOKEN.findall(template)):
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if not isinstance(text, str):
            return None
        texts[name] = text
    return texts


def _render_template(
    template: str, tokens: Mapping[str, str], messages: list[dict[str, Any]], **kwargs: Any
) -> str:
    """Return the text of messages by a template. It raises whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=template, **{**tokens, **kwargs})
    return str(text)
