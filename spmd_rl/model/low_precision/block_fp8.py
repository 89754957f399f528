"""Model folders in block FP8, as DeepSeek and Qwen publish them; needs no torch.

A weight is e4m3 codes, and beside it are scales of its blocks of 128 x 128. config.json says so in
`quantization_config`. Other layouts of quantized weights are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.spec import HEAD, ModelSpec

CONFIG_KEY = "quantization_config"
BLOCK_SHAPE = (128, 128)
_LAYOUT = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK_SHAPE)}


def check_quantization(config: Fields) -> None:
    """Raise a ConfigError for quantized weights in another layout."""
    found = config.raw.get(CONFIG_KEY)
    if not found:
        return
    given = {"fmt": "e4m3"} | (found if isinstance(found, dict) else {})
    if {key: given.get(key) for key in _LAYOUT} != _LAYOUT:
        raise ConfigError(
            f"{config.where}: {CONFIG_KEY} is set, and of quantized models those with quant_method "
            '"fp8", fmt "e4m3" and weight_block_size [128, 128] are read'
        )


def refuse_for_sglang(folder: str | Path) -> None:
    """Raise a ConfigError for a folder in block FP8, whose weights SGLang keeps in 8 bits."""
    if read_object(Path(folder) / "config.json").get(CONFIG_KEY):
        raise ConfigError(
            f"{folder} is in block FP8, and SGLang would keep its weights in 8 bits, where a push "
            'brings whole ones: set engine.kind = "native"'
        )


def quantization_config(spec: ModelSpec) -> dict[str, Any]:
    """Return what the config.json of a folder in block FP8 says of its weights."""
    routers = [one.name for one in spec.parameters() if one.is_router]
    plain = [name.removesuffix(".weight") for name in (HEAD, *routers)]
    return _LAYOUT | {"activation_scheme": "dynamic", "modules_to_not_convert": plain}


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a weight's scales."""
    return tuple(-(-size // block) for size, block in zip(shape, BLOCK_SHAPE, strict=True))
