"""Prompts, and their columns. numpy only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from spmd_rl.types.columns import Columns, concatenate, split_at

T = TypeVar("T")

# prompts of evaluations count from here, so that an engine may have training prompts beside them
FIRST_EVALUATED = 1 << 48

_new, _set = object.__new__, object.__setattr__


def construct(cls: type[T], values: dict[str, Any]) -> T:
    """Return an instance with these fields, twice as fast as a frozen dataclass's `__init__`."""
    instance = _new(cls)
    _set(instance, "__dict__", values)
    return instance


def question_of(chat: dict[str, Any]) -> str:
    """Return the text of the last message of the user in a chat; "" without one."""
    contents = [one.get("content") for one in chat.get("messages", ()) if one.get("role") == "user"]
    last = contents[-1] if contents else ""
    if isinstance(last, list):  # parts, of which some are text
        return "\n".join(str(part.get("text", "")) for part in last if isinstance(part, dict))
    return last if isinstance(last, str) else ""


def prompt_name(uid: int) -> str:
    """Return what errors call a prompt: its number among the draws, or in its evaluation set."""
    if uid < FIRST_EVALUATED:
        return f"prompt {uid}"
    return f"evaluation prompt {uid - FIRST_EVALUATED}"


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt.

    `uid` numbers the draw, not the record of the data file. A record drawn in two epochs has two
    uids, so its samples use different random streams. `reward` holds the weights of the reward
    functions that grade this prompt's samples, by their names; empty, the run's own grade them.
    `chat` holds what a chat template made the text of: "messages", and "tools" and
    "template_kwargs" where there are any. It is empty without a chat template.
    """

    uid: int
    tokens: NDArray[np.int32]
    text: str = ""
    answer: str = ""
    source: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    reward: dict[str, float] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The text of the last message of the user; "" without a chat."""
        return question_of(self.chat)

    def replace(self, **values: Any) -> Prompt:
        """Return a copy with these fields changed, five times as fast as `dataclasses.replace`."""
        return construct(Prompt, self.__dict__ | values)

    @staticmethod
    def to_columns(prompts: list[Prompt]) -> PromptColumns:
        """Return the columns in which a list of prompts crosses between processes."""
        return PromptColumns(
            lengths=np.array([len(prompt.tokens) for prompt in prompts], np.int64),
            uid=np.array([prompt.uid for prompt in prompts], np.int64),
            tokens=concatenate([prompt.tokens for prompt in prompts], np.int32),
            **{name: [getattr(prompt, name) for prompt in prompts] for name in _LISTS},
        )


_LISTS = tuple(one.name for one in fields(Prompt) if one.name not in ("uid", "tokens"))


@dataclass(frozen=True)
class PromptColumns(Columns):
    """Prompts in columns; `lengths` counts tokens."""

    RAGGED = ("tokens",)

    uid: NDArray[np.int64]
    tokens: NDArray[np.int32]
    text: list[str]
    answer: list[str]
    source: list[str]
    meta: list[dict[str, Any]]
    reward: list[dict[str, float]]
    chat: list[dict[str, Any]]

    def rows(self) -> list[Prompt]:
        """Return the prompts as objects. Raises: ValueError, as `check` does."""
        self.check()
        tokens = split_at(self.tokens, self.offsets)
        columns = [getattr(self, name) for name in _LISTS]
        return list(map(Prompt, self.uid.tolist(), tokens, *columns))
