"""Conversations as sequences to learn: each assistant turn after the prompt that an engine gets.

The chat template renders the conversation up to a turn, with the beginning of the turn: that is the
turn's prompt. What it adds when the turn is there is the turn's text. Each piece of text is
tokenised once, and tokens are only appended. Where the prompt of a turn does not begin with the
sequence so far, because the template rewrites earlier turns, another sequence begins.

Some templates end a turn with nothing: the next message begins with a marker, at which an engine
stops. Such a marker ends the turn, and is learned with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd_rl.data.message_fields import MARKS, weight_of
from spmd_rl.data.render.chat import Chat, render
from spmd_rl.data.render.eos import eos_ids
from spmd_rl.data.render.messages import Message, without
from spmd_rl.data.render.tokenizer import Tokenizer
from spmd_rl.errors import DataError
from spmd_rl.types.sft_pair import SftPair

Learn = Literal["all", "last"]

_PROBE = "what this turn of the assistant says"  # in place of a turn, whose thoughts may be hidden


def learned_turns(chat: Chat, learn: Learn) -> list[int]:
    """Return the positions of the assistant messages to learn, at least one.

    `learn` says which they are, unless a message says so itself by its "weight", 0 or 1.
    Raises: DataError for another weight, for one of 1 that is not the assistant's, and when nothing
    is left to learn.
    """
    weights = [_weight(chat, number) for number in range(len(chat.messages))]
    turns = [number for number, m in enumerate(chat.messages) if m["role"] == "assistant"]
    if not turns:
        raise DataError(chat.where, "this conversation has no assistant message to learn")
    chosen = turns if learn == "all" else turns[-1:]
    learned = [n for n in turns if (n in chosen if weights[n] is None else weights[n])]
    if not learned:
        raise DataError(chat.where, "every assistant message of this conversation has weight 0")
    if 0 in learned:
        raise DataError(
            chat.place(0),
            "the conversation begins with the assistant, so no prompt stands before this: give it "
            "weight 0, or put a message before it",
        )
    return learned


def _weight(chat: Chat, number: int) -> int | None:
    weight = weight_of(chat.place(number), chat.messages[number])
    if weight and chat.messages[number]["role"] != "assistant":
        raise DataError(
            chat.place(number),
            "this message is marked as learned, but only those of the assistant are: take the mark "
            "out",
        )
    return weight


def is_empty(message: Message) -> bool:
    """Whether an assistant message says nothing: it has no text and calls no tool."""
    return not any(value for key, value in message.items() if key not in ("role", "id", *MARKS))


def ends_early(end: str) -> str:
    """Return a sentence on a text that holds `end`, an end-of-text token of the model."""
    return (
        f"this text holds {end!r}, which ends a text of this model, so that nothing after it could "
        "be learned: take it out"
    )


def encode_turns(
    chats: Sequence[Chat], learn: Learn, tokenizer: Tokenizer, eos: int
) -> list[list[SftPair]]:
    """Return the sequences of each conversation, of which most templates make one.

    `eos` ends a turn that the template ends with no end-of-text token of the model.
    Raises: DataError when the template refuses a conversation or a turn cannot be learned.
    """
    ends = {token: tokenizer.decode([token]) for token in (eos, *eos_ids(tokenizer))}
    split = [_sequences(chat, learn, tokenizer, ends, eos) for chat in chats]
    pieces = [piece for sequences in split for sequence in sequences for piece in sequence.pieces]
    encoded = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])
    return [[sequence.pair(encoded, eos) for sequence in sequences] for sequences in split]


class _Turn(NamedTuple):
    """An assistant turn: the text that an engine gets, and the text that it would answer.

    `ended` says whether the answer ends with an end-of-text token. Without, one must be added.
    """

    prompt: str
    answer: str
    ended: bool


class _Sequence:
    """Consecutive turns: the text so far, and its pieces, which are prompts and answers by turns.

    `end` is the text of the token that is added to a turn without one.
    """

    def __init__(self, end: str) -> None:
        self.text = ""
        self.pieces: list[str] = []
        self._end = end
        self._ended: list[bool] = []  # of each answer

    def append(self, turn: _Turn) -> None:
        self.pieces += [turn.prompt[len(self.text) :], turn.answer]
        self._ended.append(turn.ended)
        self.text = turn.prompt + turn.answer + ("" if turn.ended else self._end)

    def pair(self, encoded: Iterator[list[int]], eos: int) -> SftPair:
        """Return the sequence, from an iterator of which the next are the tokens of its pieces."""
        tokens, mask = [], []
        for ended in self._ended:
            prompt, answer = next(encoded), next(encoded) + ([] if ended else [eos])
            tokens += [*prompt, *answer]
            mask += [False] * len(prompt) + [True] * len(answer)
        return SftPair(np.array(tokens, np.int32), np.array(mask, np.bool_))


def _sequences(
    chat: Chat, learn: Learn, tokenizer: Tokenizer, ends: dict[int, str], eos: int
) -> list[_Sequence]:
    """Return the turns to learn, in one sequence as long as a turn's prompt goes on from it."""
    plain = replace(chat, messages=[without(message, MARKS) for message in chat.messages])
    sequences: list[_Sequence] = []
    for number in learned_turns(chat, learn):
        turn = _turn(plain, number, tokenizer, [*filter(None, ends.values())])
        if not sequences or not turn.prompt.startswith(sequences[-1].text):
            sequences.append(_Sequence(ends[eos]))
        sequences[-1].append(turn)
    return sequences


def _turn(chat: Chat, number: int, tokenizer: Tokenizer, ends: list[str]) -> _Turn:
    """Return the turn of an assistant message, which a marker of the next message may end.

    Raises: DataError when it is no continuation, or its own words hold an end-of-text token.
    """
    words = _words(chat.messages[number])
    if early := next((end for end in ends if any(end in text for text in words)), None):
        raise DataError(chat.place(number), ends_early(early))
    prompt = render(chat, tokenizer, number, generation_prompt=True)
    whole = render(chat, tokenizer, number + 1, generation_prompt=False)
    if not whole.startswith(prompt):
        raise DataError(
            chat.place(number),
            "the chat template does not render this turn after its generation prompt, so it "
            "cannot be learned here: give it weight 0, or make it the answer of a prompt",
        )
    answer = whole[len(prompt) :]
    # an engine stops at the first end-of-text token that it draws
    stop = min((answer.find(end) + len(end) for end in ends if end in answer), default=0)
    if stop:
        return _Turn(prompt, answer[:stop], ended=True)
    marker = _next_marker(chat, number, tokenizer, ends)
    return _Turn(prompt, answer + marker, bool(marker))


def _next_marker(chat: Chat, number: int, tokenizer: Tokenizer, ends: list[str]) -> str:
    """Return the end-of-text token with which the message after a turn begins, or ""."""
    messages = [*chat.messages]
    bare = {k: v for k, v in messages[number].items() if k in ("role", "content", "tool_calls")}
    # a template may refuse a call beside a text
    messages[number] = bare | ({} if "tool_calls" in bare else {"content": _PROBE})
    probed = replace(chat, messages=messages)
    whole, alone = (
        render(probed, tokenizer, stop, generation_prompt=False).rpartition(_PROBE)[2]
        for stop in (None, number + 1)
    )
    markers = "|".join(map(re.escape, sorted(ends, key=len, reverse=True)))
    found = re.match(rf"\s*({markers})", whole.removeprefix(alone))
    return found[0] if markers and found and whole.startswith(alone) else ""


def _words(value: Any) -> list[str]:
    """Return all texts in a message."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _words([*value.keys(), *value.values()])
    return [text for one in value for text in _words(one)] if isinstance(value, list) else []
