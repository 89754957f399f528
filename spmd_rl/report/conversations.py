"""Conversations of episodes as trees: what their samples share is told once, and then they part.

A sample's own context may begin with what another sample of the episode has drawn, as in a branch,
a retry or a sub-agent. Its drawn tokens are its own: they are never those of another sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from spmd_rl.types.samples import MODEL, NO_VERSION

PROMPT, CONTEXT = "prompt", "context"  # the role of the tokens before a sample's own
OBSERVED = "tool"  # that of others that no engine drew, where messages do not say another
MAX_TEXT = 400  # letters of what one of them said


@dataclass(frozen=True)
class SampleOfTree:
    """What a tree needs of a sample.

    `before` are the tokens before its own, those of the prompt unless it `has_context`. `messages`
    are the turns that follow the prompt, and `rewards` those of turns by their first token.
    Shape: `tokens`, `versions`, `mask` [R].
    """

    index: int | None
    before: Sequence[int]
    tokens: Sequence[int]
    versions: Sequence[int]
    mask: Sequence[bool]
    messages: Sequence[Any] = ()
    agent: str = ""
    rewards: dict[int, float | None] = field(default_factory=dict)
    has_context: bool = False


@dataclass(frozen=True, eq=False)
class _Speech:
    """Tokens that one has said at a time: a turn, or what was observed after it."""

    role: str
    agent: str = ""
    reward: float | None = None
    content: str = ""


@dataclass(frozen=True)
class _Token:
    """A token, whether it is learned, the version that drew it, and whose speech it is part of."""

    id: int
    speech: _Speech
    version: int = NO_VERSION
    learned: bool = False


@dataclass
class _Branch:
    """Tokens in a row, the samples that have them, and the branches that follow."""

    tokens: list[_Token]
    samples: list[int | None]
    branches: list[_Branch] = field(default_factory=list)


TextOf = Callable[[Sequence[int]], str | None]


def conversation_tree(samples: Sequence[SampleOfTree], text_of: TextOf) -> dict[str, Any]:
    """Return the tree of an episode's samples as plain data: `speeches` in a row, and `branches`.

    `text_of` returns the text of tokens, or None where no tokenizer is known; then messages say it.
    """
    root = _Branch([], [])
    # what a sample begins with is drawn by one that begins earlier
    for number, sample in enumerate(sorted(samples, key=lambda one: len(one.before))):
        _insert(root, _tokens_of(sample), len(sample.before), sample.index, is_first=not number)
    return _told(root, text_of)


def num_speeches(tree: dict[str, Any]) -> int:
    """Return how many speeches follow the prompt in a tree."""
    own = sum(speech["role"] != PROMPT for speech in tree["speeches"])
    return own + sum(map(num_speeches, tree["branches"]))


def num_letters(tree: dict[str, Any]) -> int:
    """Return how many letters a tree has in all."""
    own = sum(len(speech["text"]) for speech in tree["speeches"])
    return own + sum(map(num_letters, tree["branches"]))


def _insert(
    branch: _Branch, tokens: list[_Token], num_shared: int, index: int | None, *, is_first: bool
) -> None:
    """Add a sample, of which the first `num_shared` tokens may be those of others."""
    if is_first:
        branch.tokens, branch.samples = tokens, [index]
        return
    while True:
        size = _num_alike(branch.tokens, tokens[:num_shared])
        if size < len(branch.tokens):
            rest = _Branch(branch.tokens[size:], branch.samples, branch.branches)
            branch.tokens, branch.branches = branch.tokens[:size], [rest]
        branch.samples = [*branch.samples, index]
        tokens, num_shared = tokens[size:], num_shared - size
        if not num_shared:
            break
        alike = [one for one in branch.branches if one.tokens[0].id == tokens[0].id]
        if not alike:
            break
        branch = alike[0]
    if tokens:
        branch.branches.append(_Branch(tokens, [index]))


def _num_alike(one: list[_Token], other: list[_Token]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a.id != b.id), min(len(one), len(other)))


def _tokens_of(sample: SampleOfTree) -> list[_Token]:
    """Return the tokens before a sample's own, and its own, cut into speeches."""
    context = _Speech(CONTEXT if sample.has_context else PROMPT, sample.agent)
    tokens = [_Token(token, context) for token in sample.before]
    is_drawn = [version != NO_VERSION for version in sample.versions]
    runs = _runs(is_drawn, sample.rewards)
    speakers = _speakers(sample.messages, [is_drawn[start] for start, _ in runs])
    for (start, stop), speech in zip(runs, speakers, strict=True):
        reward = sample.rewards.get(start)
        own = replace(speech, agent=sample.agent, reward=reward)
        for at in range(start, stop):
            version, learned = sample.versions[at], sample.mask[at]
            tokens.append(_Token(sample.tokens[at], own, version, learned))
    return tokens


def _runs(is_drawn: Sequence[bool], firsts: Iterable[int]) -> list[tuple[int, int]]:
    """Return where runs of tokens that were drawn, and of others, start and stop.

    A turn that follows another at once begins at one of `firsts`.
    """
    size = len(is_drawn)
    changes = [at for at in range(1, size) if is_drawn[at] != is_drawn[at - 1]]
    turns = [at for at in firsts if 0 < at < size and is_drawn[at]]
    starts = sorted({*changes, *turns, *([0] if size else [])})
    return list(zip(starts, [*starts[1:], size], strict=True)) if size else []


def _speakers(messages: Sequence[Any], is_drawn: list[bool]) -> list[_Speech]:
    """Return who speaks in each run of tokens: by the messages, if these have the same runs.

    The last message may be one that the policy never saw.
    """
    told = [one for one in messages if isinstance(one, dict)]
    grouped = [[*own] for _, own in groupby(told, key=lambda one: one.get("role") == MODEL)]
    drawn = [own[0].get("role") == MODEL for own in grouped]
    if drawn[: len(is_drawn)] != is_drawn or len(drawn) > len(is_drawn) + 1:
        return [_Speech(MODEL if one else OBSERVED) for one in is_drawn]
    return [
        _Speech(
            ", ".join(dict.fromkeys(str(one.get("role", OBSERVED)) for one in own)),
            content="\n".join(str(one.get("content") or "") for one in own),
        )
        for own in grouped[: len(is_drawn)]
    ]


def _told(branch: _Branch, text_of: TextOf) -> dict[str, Any]:
    """Return a branch as plain data. A sample that goes on where another ends is no branch."""
    samples, tokens = branch.samples, branch.tokens
    while len(branch.branches) == 1:
        (branch,) = branch.branches
        tokens = tokens + branch.tokens
    return {
        "samples": sorted(samples, key=lambda index: (index is None, index or 0)),
        "speeches": [
            _speech(speech, [*own], text_of)
            for speech, own in groupby(tokens, key=lambda token: token.speech)
        ],
        "branches": [_told(one, text_of) for one in branch.branches],
    }


def _speech(speech: _Speech, tokens: list[_Token], text_of: TextOf) -> dict[str, Any]:
    versions = [token.version for token in tokens if token.version != NO_VERSION]
    text = text_of([token.id for token in tokens])
    return {
        "role": speech.role,
        "agent": speech.agent,
        "reward": speech.reward,
        "text": shortened(speech.content if text is None else text),
        "num_tokens": len(tokens),
        "num_learned": sum(token.learned for token in tokens),
        "versions": [min(versions), max(versions)] if versions else [],
    }


def shortened(text: str) -> str:
    """Return a text with its middle left out, if it is long."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} … {text[-half:]}"
