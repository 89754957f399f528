"""Files of a model folder beside its weights, which an exported folder has as well."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

# what makes texts of messages and tokens of texts: vocabularies, their settings, chat templates
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
)
MODEL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)


def copy_files(source: str | Path, target: Path, patterns: Iterable[str]) -> None:
    """Copy the files of the folder `source` that match one of the patterns, with their folders."""
    folder = Path(source)
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file():
                copy = target / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
