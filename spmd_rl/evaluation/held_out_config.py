"""Settings of evaluations on held-out data, in recipes without an engine.

[eval]                               --eval.data=held_out.jsonl
every = 20                           --eval.every=20

[eval.sets.code]                     --eval.sets.code.data=code.jsonl
data = "code.jsonl"
prompts.answer_key = "solution"      --eval.sets.code.prompts.answer_key=solution
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from spmd_rl.config.load import overlay
from spmd_rl.data.documents import DocumentConfig
from spmd_rl.data.render.prompt_format import PromptFormat
from spmd_rl.evaluation.schedule import EvalSettings, name_of_file

Format = TypeVar("Format", bound=PromptFormat | DocumentConfig)


@dataclass(frozen=True)
class HeldOutSet:
    """One file of held-out answers or pairs."""

    data: str  # a slice as path@[a:b]
    prompts: dict[str, Any] = field(default_factory=dict)  # settings other than eval.prompts's


@dataclass(frozen=True)
class HeldOutConfig(EvalSettings):
    """When a run evaluates, and on which answers or pairs. Without a set, it never does."""

    sets: dict[str, HeldOutSet] = field(default_factory=dict)  # several sets by their names
    # settings of prompts in which evaluations differ from the run, such as answer_key
    prompts: dict[str, Any] = field(default_factory=dict)
    FORMAT: ClassVar[str] = "prompts"


@dataclass(frozen=True)
class DocumentSet:
    """One file of held-out documents."""

    data: str  # a slice as path@[a:b]
    documents: dict[str, Any] = field(default_factory=dict)  # settings other than eval.documents's


@dataclass(frozen=True)
class DocumentEvalConfig(EvalSettings):
    """When a run evaluates, and on which documents. Without a set, it never does."""

    sets: dict[str, DocumentSet] = field(default_factory=dict)  # several sets by their names
    # settings of documents in which evaluations differ from the run, such as text_key
    documents: dict[str, Any] = field(default_factory=dict)
    FORMAT: ClassVar[str] = "documents"


def held_out_sets(
    cfg: HeldOutConfig | DocumentEvalConfig, base: Format
) -> Mapping[str, tuple[str, Format]]:
    """Return the file and the format of each set by its name; `base` is the run's own format.

    Records are in the order of the file.
    Raises: ConfigError, which names the key, for a setting that there is not.
    """
    key = cfg.FORMAT
    common = overlay(replace(base, shuffle=False), getattr(cfg, key), f"eval.{key}")
    if cfg.data:
        return {name_of_file(cfg.data): (cfg.data, common)}
    return {
        name: (one.data, overlay(common, getattr(one, key), f"eval.sets.{name}.{key}"))
        for name, one in cfg.sets.items()
    }
