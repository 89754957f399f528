"""Adapters in a PEFT folder: what its config and the headers of its file say; needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spmd_rl.errors import ConfigError
from spmd_rl.model.json_fields import Fields, read_object
from spmd_rl.model.lora import TARGETS, A, LoraConfig
from spmd_rl.model.read import ADAPTER
from spmd_rl.model.spec import ModelSpec
from spmd_rl.model.weight_files import StoredTensor, tensors_in

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# fields of adapter_config.json that change nothing that is computed here, or that are compared
READ = {
    *("peft_type", "r", "lora_alpha", "bias", "init_lora_weights"),
    # which modules have adapters is seen by the names of the tensors
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode"),
    *("peft_version", "lora_dropout", "megatron_core", "megatron_config", "runtime_config"),
    *("loftq_config", "eva_config", "corda_config", "qalora_group_size"),
}
# beginnings of adapters that leave the base as it is; others, such as pissa's, change it
PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


def stored_adapters(lora: LoraConfig, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return where every adapter of `lora.folder` lies, by name; reads headers only.

    Raises: ConfigError if the folder holds what is not computed here, has another rank, alpha or
    targets than `lora`, or does not fit a model of this spec.
    """
    path = Path(lora.folder) / ADAPTER
    if not path.is_file():
        raise ConfigError(
            f"trainer.lora.folder = {lora.folder!r}: expected a PEFT folder, but there is no "
            f"{ADAPTER} in it"
        )
    config = Fields(str(path), read_object(path))
    _refuse_unread(config)
    weights = path.parent / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ConfigError(f"{lora.folder} holds no {ADAPTER_WEIGHTS}")
    found = {key.removeprefix(PREFIX): one for key, one in tensors_in([weights]).items()}
    _require_settings(config, lora, found, spec)
    _require_shapes(lora, found, spec)
    return found


def _refuse_unread(config: Fields) -> None:
    """Raise a ConfigError for adapters that compute anything but base(x) + B(scale * A(x))."""
    if config.value("peft_type") != "LORA":
        raise config.wrong("peft_type", '"LORA"')
    if config.value("bias", "none") != "none":
        raise config.wrong("bias", '"none", as biases are not trained beside adapters')
    begin = config.raw.get("init_lora_weights")
    if begin is not None and begin not in PLAIN_BEGINNINGS:
        raise config.wrong("init_lora_weights", "adapters whose base is the model as it is")
    for key, value in config.raw.items():
        if key not in READ and value:
            raise config.wrong(key, "nothing, as it is not computed here")


def _require_settings(
    config: Fields, lora: LoraConfig, found: Collection[str], spec: ModelSpec
) -> None:
    """Raise a ConfigError unless the folder's rank, alpha and targets are those that are set."""
    rank, alpha = config.count("r"), config.number("lora_alpha", 8.0)  # PEFT's default
    targets = [name for name in TARGETS if any(f".{name}.{A}." in key for key in found)]
    if (rank, alpha, targets) != (lora.rank, lora.alpha, list(lora.of_model(spec).projections)):
        names = ", ".join(f'"{name}"' for name in targets)
        raise ConfigError(
            f"the adapters in {lora.folder} are others than trainer.lora says: set "
            f"trainer.lora.rank = {rank}, trainer.lora.alpha = {alpha:g} and "
            f"trainer.lora.targets = [{names}]"
        )


def _require_shapes(lora: LoraConfig, found: Mapping[str, StoredTensor], spec: ModelSpec) -> None:
    """Raise a ConfigError unless these are all adapters of a model of this spec."""
    wanted: dict[str, Any] = {**lora.shapes(spec)}
    problem = ""
    for name, one in found.items():
        if name not in wanted:
            problem = f"{one.key} belongs to no projection of the model"
        elif one.shape != wanted[name]:
            problem = f"{one.key} is {list(one.shape)}, and the model needs {list(wanted[name])}"
        if problem:
            break
    if missing := sorted(wanted.keys() - found.keys()):
        problem = problem or f"it lacks {len(missing)} adapters, first {missing[0]}"
    if problem:
        raise ConfigError(
            f"the adapters in {lora.folder} have another base than `model`, whose folder it must "
            f"be: {problem}"
        )
