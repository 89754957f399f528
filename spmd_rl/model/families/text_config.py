"""The text model within the folder of one that sees: its part of the config, and its names."""

from __future__ import annotations

from spmd_rl.model.json_fields import Fields

KEY = "text_config"
PREFIX = "model.language_model."  # of the names of its tensors, where others have `model.`
VISION = ("model.visual.",)
OUTER = ("tie_word_embeddings", "quantization_config")  # keys that stand beside those of the text


def text_config(config: Fields) -> Fields:
    """Return what a config says of its text model. Raises: ConfigError if it is no object."""
    text = config.value(KEY)
    if not isinstance(text, dict):
        raise config.wrong(KEY, "an object")
    outer = {key: config.raw[key] for key in OUTER if key in config.raw}
    return Fields(f"{config.where}: {KEY}", text | outer)
