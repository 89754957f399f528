"""View of a data file: as which recipe reads it, and with which settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmd_rl.config.load import load
from spmd_rl.data.files.record import DataRecord
from spmd_rl.data.files.record_store import Preparer
from spmd_rl.data.pairs import PairConfig, pair_preparer
from spmd_rl.data.prompt_records import PromptConfig, PromptPreparer
from spmd_rl.data.render.messages import written_messages
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.data.render.turns import Learn
from spmd_rl.data.sft import sft_preparer
from spmd_rl.errors import ConfigError, DataError

PAIRS = ("dpo", "reward_model")
PROMPTS = ("grpo", "grpo_async", "grpo_fully_async", "rlhf", "distill", "collect")
RECIPES = (*PROMPTS, "rejection_sampling", "sft", *PAIRS)

_CHAT, _MESSAGES = "chat_template=true", "prompt_key=messages"


@dataclass(frozen=True)
class View:
    """How a recipe reads a file. `deduced` are settings that were read off the first record.

    `learn` says which messages `sft` learns; None for all other recipes.
    """

    recipe: str
    cfg: PairConfig | PromptConfig
    learn: Learn | None
    deduced: list[str]

    def preparer(self, tokenizer: Tokenizer) -> Preparer[Any]:
        """Return what the recipe makes its records with. Raises: ConfigError."""
        if isinstance(self.cfg, PairConfig):
            of_rewards = self.recipe == "reward_model"
            return pair_preparer(self.cfg, tokenizer, for_reward_model=of_rewards)
        if self.learn:
            return sft_preparer(self.cfg, tokenizer, self.learn)
        return PromptPreparer(self.cfg, tokenizer)


def view_of(
    recipe: str | None,
    settings: list[str],
    learn: Learn | None,
    first: DataRecord | None,
) -> View:
    """Return the view of a recipe; without one, that of the recipe that a file's records suit.

    `settings` are those of the prompts, as KEY=VALUE; none is deduced for a recipe that is named.
    `first` is a record of the file, or None when all are broken.
    Raises: ConfigError for settings that the recipe has not.
    """
    deduced: list[str] = []
    if recipe is None:
        recipe, deduced = _deduced(settings, learn, first)
    if learn and recipe != "sft":
        raise ConfigError(f"--learn is a setting of sft, but the file is checked for {recipe}")
    overrides = [*deduced, *settings]
    cfg: PairConfig | PromptConfig
    if recipe in PAIRS:
        cfg = load(PairConfig, overrides=overrides)
    else:
        cfg = load(PromptConfig, overrides=overrides)
    return View(recipe, cfg, (learn or "all") if recipe == "sft" else None, deduced)


def _deduced(
    settings: list[str], learn: Learn | None, first: DataRecord | None
) -> tuple[str, list[str]]:
    """Return the recipe that reads records like the first one, and the settings it needs."""
    given = dict(word.partition("=")[::2] for word in settings)
    row = first.row if first else {}
    if {"chosen_key", "rejected_key"} & given.keys() or row.keys() >= {"chosen", "rejected"}:
        keys = [given.get(f"{name}_key", name) for name in ("prompt", "chosen", "rejected")]
        prompt, *answers = (_listed(row.get(key)) for key in keys)
        # one message alone is an answer in any data
        chat = isinstance(prompt, list) or any(
            isinstance(answer, list) and len(answer) > 1 for answer in answers
        )
        return "dpo", _without_given([_CHAT] if chat else [], given)
    key = given.get("prompt_key", "prompt")
    wanted = []
    if (
        key not in row
        and "prompt_key" not in given
        and isinstance(_listed(row.get("messages")), list)
    ):
        key, wanted = "messages", [_MESSAGES]
    prompt = _listed(row.get(key))
    wanted += [_CHAT] if isinstance(prompt, list) else []
    if learn or _ends_with_assistant(prompt):
        answered = given.get("answer_key", "answer") in row
        wanted += [] if answered else ["answer_key="]
        return "sft", _without_given(wanted, given)
    return "grpo", _without_given(wanted, given)


def _listed(value: Any) -> Any:
    """Return messages that are written as JSON text as a list, and anything else as it is."""
    try:
        messages = written_messages("", value)
    except DataError:
        return value
    return value if messages is None else messages


def _without_given(wanted: list[str], given: dict[str, str]) -> list[str]:
    return [word for word in wanted if word.partition("=")[0] not in given]


def _ends_with_assistant(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"
