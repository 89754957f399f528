"""Sides of a comparison by their names on the command line."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmd_rl.errors import ConfigError
from spmd_rl.kernels.contract import dtype_of
from spmd_rl.mesh.alone import alone
from spmd_rl.mesh.role_context import RoleContext
from spmd_rl.microscope.diagnose.compare import begin_sentence, name_in_sentence
from spmd_rl.microscope.diagnose.faults import plant
from spmd_rl.microscope.foreign.dump import Dump, DumpPass
from spmd_rl.microscope.foreign.sglang_side import OWNED, SglangSide, write_sglang_dump
from spmd_rl.microscope.replay.backend_pass import MegatronPass
from spmd_rl.microscope.replay.case import ReplayCase
from spmd_rl.microscope.replay.engine_pass import EnginePass
from spmd_rl.microscope.replay.forward_pass import ForwardPass
from spmd_rl.microscope.replay.weights import ReplayWeights
from spmd_rl.microscope.role_pass import SPLIT, forward_pass
from spmd_rl.model.attention import backend_of
from spmd_rl.model.foreign.names import NOT_COMPARED, is_foreign
from spmd_rl.model.lora import NO_LORA, LoraConfig
from spmd_rl.model.parts.part import row_shards_of_run
from spmd_rl.model.read import read_spec
from spmd_rl.model.spec import ModelSpec

DUMP = "dump"
SGLANG = ("sglang", "sglang-deterministic")
FOREIGN = (*SGLANG, DUMP)  # sides that run elsewhere
LIBRARIES = ("transformers", *FOREIGN)  # sides that are no role of ours
MEGATRON = MegatronPass.name
PASSES = ("engine", "trainer", MEGATRON, *LIBRARIES)
# Differences on the same input that count as rounding, as a share of a row's largest output.
ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def engine_of(settings: dict[str, Any]) -> str:
    """Return the side that is the run's engine."""
    return "sglang" if settings.get("engine", {}).get("kind") == "sglang" else "engine"


def device_of(options: argparse.Namespace) -> torch.device:
    return torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtypes_of(
    options: argparse.Namespace, settings: dict[str, Any]
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes that the left and the right side are to compute in.

    They are those of the roles in the run; what is no role has that of the other side.
    """

    def dtype(name: str, other: str) -> torch.dtype:
        role = "engine" if name in SGLANG and engine_of(settings) == "sglang" else name
        role = other if role in LIBRARIES else role
        role = "trainer" if role == MEGATRON else role
        asked = options.dtype or settings.get(role, {}).get("dtype", "auto")
        return _dtype_named(asked, device_of(options))

    return dtype(options.left, options.right), dtype(options.right, options.left)


def _dtype_named(name: str, device: torch.device) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_of(name, device))
    return dtype


def tolerance_of(
    options: argparse.Namespace, left: ForwardPass, right: ForwardPass
) -> float | None:
    """Return what counts as rounding: what was asked for, or what the dtype of a dump rounds."""
    if options.tolerance is not None:
        return float(options.tolerance)
    if left.is_recorded or right.is_recorded:
        return max(ROUNDING[left.dtype], ROUNDING[right.dtype])
    return None


@dataclass(frozen=True)
class Replay:
    """What both sides compute, and with which weights; they write theirs to `temporary`.

    `run` and its `settings` are empty if there is none. `dropped_splits` says whether the settings
    had attention splits, which cannot run here.
    """

    options: argparse.Namespace
    run: Path | None
    settings: dict[str, Any]
    case: ReplayCase
    weights: ReplayWeights
    temporary: Path
    dropped_splits: bool = False

    @property
    def device(self) -> torch.device:
        return device_of(self.options)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each side."""
        names = self.options.left, self.options.right
        return dict(zip(names, dtypes_of(self.options, self.settings), strict=True))

    def folder_of(self, name: str, temporary: Path | None = None) -> Path:
        """Return the folder from which a side loads: a plain one without adapters and codes."""
        if _is_coded(name, self.weights.lora):
            return self.weights.folder
        trainer = self.settings.get("trainer", {})
        dtype = _dtype_named(trainer.get("dtype", "auto"), self.device)
        return self.weights.plain(
            trainer.get("weights", "full"), dtype, temporary or self.temporary
        )

    def passes(self, context: RoleContext | None = None) -> tuple[ForwardPass, ForwardPass]:
        """Return the left and the right pass, with the fault that the options plant.

        Megatron-core needs the `context` of `world_of`. SGLang runs before the other side's weights
        are loaded.
        """
        recorded = {name: self._recorded(name) for name in self.dtypes if name in FOREIGN}
        left, right = (
            recorded.get(name) or self._pass(name, dtype, context, share_prompts=not recorded)
            for name, dtype in self.dtypes.items()
        )
        if self.options.plant:
            assert isinstance(left, EnginePass)
            plant(self.options.plant, left)
        return left, right

    def _recorded(self, name: str) -> DumpPass:
        """Return the side that runs elsewhere."""
        path = Path(self.options.dump or "")
        if name in SGLANG:
            options = self.options.sglang_options or {}
            side = SglangSide(self.options.sglang or "", options, name == SGLANG[1])
            folder, model = self.temporary / "sglang", self.folder_of(name)
            path = write_sglang_dump(side, self.case, model, self.dtypes[name], folder)
        return DumpPass(Dump(path, read_spec(self.weights.folder)), self.device, name)

    def _pass(
        self, name: str, dtype: torch.dtype, context: RoleContext | None, share_prompts: bool
    ) -> ForwardPass:
        model = self.folder_of(name)
        if name == MEGATRON:
            assert context is not None
            return _megatron_pass(model, dtype, context, self.settings)
        lora = self.weights.lora if model == self.weights.folder else NO_LORA
        return forward_pass(
            name, model, dtype, self.device, self.settings, share_prompts=share_prompts, lora=lora
        )


def world_of(options: argparse.Namespace) -> AbstractContextManager[RoleContext | None]:
    """Return a world of one rank, to be open while Megatron-core runs, if it is one of the sides.

    Raises: ConfigError where it would run on another device.
    """
    if MEGATRON not in (options.left, options.right):
        return nullcontext()
    if torch.cuda.is_available() and device_of(options).type == "cpu":
        raise ConfigError(
            "--device cpu: Megatron-core runs on a GPU where there is one; "
            "set CUDA_VISIBLE_DEVICES= to hide it"
        )
    return alone("train")


def refuse_mixture(options: argparse.Namespace, spec: ModelSpec) -> None:
    """Raise a ConfigError for a side that cannot replay a mixture of experts."""
    unable = {MEGATRON, *SGLANG} & {options.left, options.right}
    if spec.num_experts and unable:
        raise ConfigError(
            f"{spec.family} is a mixture of experts, which {min(unable)} does not replay here, as "
            "its modules of experts are not hooked: compare engine, trainer and transformers"
        )


def megatron_notes(options: argparse.Namespace, settings: dict[str, Any]) -> list[str]:
    """Return sentences on a run whose trainer was Megatron-core's: how else it was computed."""
    if settings.get("trainer", {}).get("backend", {}).get("kind") != MEGATRON:
        return []
    if MEGATRON not in (options.left, options.right):
        return ["The run's trainer was Megatron-core's: --right megatron replays it on one rank."]
    if settings["trainer"]["backend"].get("layers", "local") == "local":
        return []
    return [
        "The run's trainer had transformer-engine's layers, whose bits are others: here local "
        "layers replay it (docs/megatron.md)."
    ]


def plain_notes(
    options: argparse.Namespace, settings: dict[str, Any], lora: LoraConfig
) -> list[str]:
    """Return sentences on the sides that have neither adapters nor codes."""
    weights = settings.get("trainer", {}).get("weights", "full")
    parts = [] if weights == "full" else [f"what the {weights} codes of weights stand for"]
    parts += ["the adapters merged into the weights"] if lora.rank else []
    if not parts:
        return []
    plain = [one for one in (options.left, options.right) if not _is_coded(one, lora)]
    names = [begin_sentence(name_in_sentence(one)) for one in plain]
    return [f"{name} computes with {' and '.join(parts)}." for name in names]


def _is_coded(name: str, lora: LoraConfig) -> bool:
    """Return whether a side has adapters and codes as the run's trainer does."""
    return name == "trainer" or (name == "engine" and not lora.merged_push)


def _megatron_pass(
    model: Path, dtype: torch.dtype, context: RoleContext, settings: dict[str, Any]
) -> MegatronPass:
    """Return the pass with the run's settings. Options of another backend are not its own."""
    trainer = settings.get("trainer", {})
    backend = trainer.get("backend", {})
    options = backend.get("model_options", {}) if backend.get("kind") == MEGATRON else {}
    keys = {key: trainer[key] for key in ("max_tokens", "logit_rows") if key in trainer}
    keys["row_shards"] = row_shards_of_run(settings)
    return MegatronPass(model, dtype, context, **keys, model_options=options)


def drop_splits(
    settings: dict[str, Any], spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> bool:
    """Remove attention splits from a run's settings if they cannot run here.

    Returns whether there were any.
    """
    if backend_of(spec, dtype, device).has_splits:
        return False
    dropped = [
        role.pop(SPLIT, 0) for role in (settings.get("engine", {}), settings.get("trainer", {}))
    ]
    return any(dropped)


def require_chosen_program(options: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Require that the command line chooses SGLang, its interpreter and its options.

    A run's folder may come from anybody, so what its settings name is not run.
    Raises: ConfigError with the words to add, or for a model without bits to compare.
    """
    if is_foreign(str(settings.get("model"))):
        raise ConfigError(f"{NOT_COMPARED}, so none are looked for here")
    if engine_of(settings) != "sglang":
        return
    engine, words = settings["engine"], []
    if options.left is None:
        words += ["--left", "sglang"]
    if options.left in (None, *SGLANG) or options.right in SGLANG:
        if options.sglang is None and engine.get("python"):
            words += ["--sglang", str(engine["python"])]
        own = {key: value for key, value in engine.get("options", {}).items() if key not in OWNED}
        if options.sglang_options is None and own:
            words += ["--sglang-options", json.dumps(own)]
    if words:
        raise ConfigError(
            "the run generated with SGLang, a program that is not started because a folder names "
            f"it: add {shlex.join(words)} if you trust the folder, or choose --left engine"
        )
