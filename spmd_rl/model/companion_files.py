"""Files of a model folder beside its weights, which an exported folder has as well."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from spmd_rl.errors import ConfigError

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
    """Copy the files of the folder `source` that match one of the patterns, with their folders.

    Raises: ConfigError for a link that leads out of the folder, and not into the cache of Hugging
    Face that the folder is in: a folder that was received must not name files of ours.
    """
    folder = Path(source)
    homes = [folder.resolve()]
    if homes[0].parent.name == "snapshots":
        homes.append(homes[0].parents[1] / "blobs")
    for pattern in patterns:
        for file in folder.glob(pattern):
            if file.is_file():
                if not any(map(file.resolve().is_relative_to, homes)):
                    raise ConfigError(
                        f"{file} is a link to a file outside of the model folder: replace it by "
                        "the file"
                    )
                copy = target / file.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
