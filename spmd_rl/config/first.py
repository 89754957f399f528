"""First settings of a recipe: the few of its settings that people change first, in groups.

`FIRST` names those that recipes share. A recipe's own are the top-level settings of its `Config`,
unless that class names others, which may lie in tables. It may leave out settings and tables that
do not serve in it:

    first_settings: ClassVar[tuple[str, ...]] = ("sampler.max_lag", "hooks.processes")
    seldom_settings: ClassVar[tuple[str, ...]] = ("reward", "eval")
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import chain

from spmd_rl.config.describe import Key, describe
from spmd_rl.config.schema import classes_by_name, key_fields, table_classes, type_hints

FIRST: dict[str, tuple[str, ...]] = {
    "model and data": (
        "model",
        "data",
        "prompts.prompt_key",
        "prompts.answer_key",
        "prompts.chosen_key",
        "prompts.rejected_key",
        "prompts.chat_template",
        "prompts.max_prompt_tokens",
        "documents.text_key",
        "documents.max_tokens",
    ),
    "reward": ("reward", "hooks.generate"),
    "sampling": (
        "sampling.num_samples",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
        "engine.kind",
    ),
    "learning": (
        "steps",
        "epochs",
        "prompts_per_step",
        "pairs_per_step",
        "tokens_per_step",
        "algorithm",
        "trainer.lr",
        "trainer.warmup_steps",
        "trainer.minibatches",
        "trainer.lora.rank",
        "kl.coef",
    ),
    "placement and memory": (
        "split.train.ranks",
        "split.infer.ranks",
        "split.infer.tp",
        "trainer.backend.kind",
        "trainer.backend.recompute",
        "trainer.max_tokens",
    ),
    "evaluation": ("eval.data", "eval.every"),
    "run": ("run.name", "run.seed", "run.save_every", "run.resume", "run.sinks"),
}
OWN = "this recipe"
SELDOM = {"start_step"}  # at the top level of many recipes, and seldom changed


def first_groups(cls: type) -> dict[str, list[Key]]:
    """Return the first settings of a recipe's config by group; its own are the group `OWN`."""
    left_out = SELDOM | set(getattr(cls, "seldom_settings", ()))
    keys: dict[str, Key] = {}
    for key in describe(cls):
        if not left_out & {key.name, key.name.partition(".")[0]}:
            keys.setdefault(key.name, key)
    shared = set(chain.from_iterable(FIRST.values()))
    own = [name for name in dict.fromkeys(_own_names(cls)) if name not in shared]
    title, *_ = FIRST
    groups = {title: FIRST[title], OWN: own, **FIRST}  # a recipe's own are the second group
    found = {
        title: [keys[name] for name in names if name in keys] for title, names in groups.items()
    }
    return {title: first for title, first in found.items() if first}


def _own_names(cls: type) -> Iterator[str]:
    """Yield the `first_settings` of each class of a recipe, else what it has at the top level."""
    for part in reversed(cls.__mro__):
        yield from part.__dict__.get("first_settings", _top_level(cls, part))


def _top_level(cls: type, part: type) -> list[str]:
    """Return the fields of `cls` that its base `part` defines, and that are no tables."""
    hints, defined = type_hints(cls), inspect.get_annotations(part)
    return [
        field.name
        for field in key_fields(cls)
        if field.name in defined
        and not table_classes(hints[field.name])
        and not classes_by_name(hints[field.name])
    ]
