"""Conversations as sequences to learn: each assistant turn after the prompt that an engine gets.

The chat template renders the conversation up to a turn, with the beginning of the turn: that is the
turn's prompt. What it adds when the turn is there is the turn's text. Each piece of text is
tokenised once, and tokens are only appended. Where the prompt of a turn does not begin with the
sequence so far, because the template rewrites earlier turns, another sequence begins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from spmd_rl.data.chat import Chat, render
from spmd_rl.data.eos import eos_ids
from spmd_rl.data.messages import Message
from spmd_rl.data.prompt_format import Tokenizer
from spmd_rl.data.sft_pair import SftPair
from spmd_rl.errors import DataError

Learn = Literal["all", "last"]


def learned_turns(chat: Chat, learn: Learn) -> list[int]:
    """Return the positions of the assistant messages to learn, at least one.

    `learn` says which they are, unless a message says so itself by its "weight", 0 or 1.
    Raises: DataError for another weight, and when nothing is left to learn.
    """
    turns = [number for number, m in enumerate(chat.messages) if m["role"] == "assistant"]
    if not turns:
        raise DataError(chat.where, "this conversation has no assistant message to learn")
    chosen = turns if learn == "all" else turns[-1:]
    learned = [number for number in turns if _weight(chat, number, number in chosen)]
    if not learned:
        raise DataError(chat.where, "every assistant message of this conversation has weight 0")
    return learned


def encode_turns(chat: Chat, learn: Learn, tokenizer: Tokenizer, eos: int) -> list[SftPair]:
    """Return the sequences of a conversation, of which most templates make one.

    `eos` ends a turn that the template ends with no end-of-text token of the model.
    Raises: DataError when the template refuses the conversation or a turn cannot be learned.
    """
    ends = [*filter(None, (tokenizer.decode([token]) for token in eos_ids(tokenizer)))]
    plain = replace(chat, messages=[_without_weight(message) for message in chat.messages])
    sequences: list[_Sequence] = []
    for number in learned_turns(chat, learn):
        turn = _turn(plain, number, tokenizer, ends)
        if not sequences or not turn.prompt.startswith(sequences[-1].text):
            sequences.append(_Sequence())
        sequences[-1].append(turn, tokenizer, eos)
    return [sequence.pair() for sequence in sequences]


class _Turn(NamedTuple):
    """An assistant turn: the text that an engine gets, and the text that it would answer.

    `ended` says whether the answer ends with an end-of-text token. Without, one must be added.
    """

    prompt: str
    answer: str
    ended: bool


class _Sequence:
    """Text and tokens of consecutive turns."""

    def __init__(self) -> None:
        self.text = ""
        self._tokens: list[int] = []
        self._mask: list[bool] = []

    def append(self, turn: _Turn, tokenizer: Tokenizer, eos: int) -> None:
        texts = [turn.prompt[len(self.text) :], turn.answer]
        prompt, answer = tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = [] if turn.ended else [eos]
        self._tokens += [*prompt, *answer, *end]
        self._mask += [False] * len(prompt) + [True] * (len(answer) + len(end))
        self.text = turn.prompt + turn.answer + ("" if turn.ended else tokenizer.decode(end))

    def pair(self) -> SftPair:
        return SftPair(np.array(self._tokens, np.int32), np.array(self._mask, np.bool_))


def _turn(chat: Chat, number: int, tokenizer: Tokenizer, ends: Iterable[str]) -> _Turn:
    """Return the turn of an assistant message. Raises: DataError when it is no continuation."""
    prompt = render(chat, tokenizer, number, generation_prompt=True)
    whole = render(chat, tokenizer, number + 1, generation_prompt=False)
    if not whole.startswith(prompt):
        raise DataError(
            f"{chat.where}[{number}]",
            "the chat template does not render this turn after its generation prompt, so it "
            "cannot be learned here: give it weight 0, or make it the answer of a prompt",
        )
    answer = whole[len(prompt) :]
    # an engine stops at the first end-of-text token that it draws
    stop = min((answer.find(end) + len(end) for end in ends if end in answer), default=0)
    return _Turn(prompt, answer[:stop] if stop else answer, bool(stop))


def _weight(chat: Chat, number: int, default: bool) -> bool:
    weight = chat.messages[number].get("weight", default)
    if weight not in (0, 1):
        raise DataError(f"{chat.where}[{number}].weight", f"expected 0 or 1, got {weight!r}")
    return bool(weight)


def _without_weight(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}
