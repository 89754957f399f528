"""Model folders whose weights are in few bits, as DeepSeek and Qwen publish them; needs no torch.

A weight is codes, and beside it are scales of its blocks. config.json says so in
`quantization_config`. What no format says of its folders is not read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.model.formats import FORMATS, mxfp4
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.spec import HEAD, ModelSpec
from spmd_rl.types.code_format import CodeFormat

CONFIG_KEY = "quantization_config"


def file_formats() -> dict[str, CodeFormat]:
    """Return the formats that folders hold, by what safetensors calls the dtype of their codes."""
    return {one.file_dtype: one for one in FORMATS.values() if one.folder}


def check_quantization(config: Fields) -> None:
    """Raise a ConfigError for quantized weights in another layout."""
    found = config.raw.get(CONFIG_KEY)
    if not found:
        return
    known = [one.folder for one in file_formats().values()] + [mxfp4.FOLDER]
    given = found if isinstance(found, dict) else {}
    if not any({"fmt": one.get("fmt"), **given}.items() >= one.items() for one in known):
        names = " or ".join(
            ", ".join(f"{key} {json.dumps(value)}" for key, value in one.items()) for one in known
        )
        raise ConfigError(
            f"{config.where}: {CONFIG_KEY} is set, and of quantized models those with {names} are "
            "read"
        )


def refuse_for_sglang(folder: str | Path) -> None:
    """Raise a ConfigError for a folder in block FP8, whose weights SGLang keeps in 8 bits."""
    if read_object(Path(folder) / "config.json").get(CONFIG_KEY):
        raise ConfigError(
            f"{folder} is in block FP8, and SGLang would keep its weights in 8 bits, where a push "
            'brings whole ones: set engine.kind = "native"'
        )


def quantization_config(spec: ModelSpec, code_format: CodeFormat) -> dict[str, Any]:
    """Return what the config.json of a folder in this format says of its weights."""
    full = [one.name for one in spec.parameters() if one.stays_full]
    plain = [name.removesuffix(".weight") for name in (HEAD, *full)]
    described = {"activation_scheme": "dynamic", "modules_to_not_convert": plain}
    return {**code_format.folder, **described}
