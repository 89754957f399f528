"""Turns of a session: what each adds to the tokens before it, and the branches that are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.gateway.faults import Fault
from spmd_rl.hooks.failures import EpisodeFailure, blaming
from spmd_rl.hooks.transcript import Transcript, TranscriptPlace, Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import FAULT, MODEL, TURNS, Sample

ALL, MAIN = "all", "main"
Decode = Callable[[NDArray[np.int32]], str]


@dataclass(eq=False)
class DrawnTurn:
    """A turn that the policy drew, and the tokens that were observed before it.

    A turn without `before` begins a context, which is then `observed`. `after` is the turn whose
    messages such a context goes on from, where the template has rewritten them. `transcript` is the
    one in which the engine may go on; None once another turn goes on in it, or it cannot. `raw` is
    the drawn text with what the template has written of it, without the token that ended it, which
    is `end`. `text` is that of all tokens which the turn adds.

    Shape: `observed` is [T].
    """

    before: DrawnTurn | None
    observed: NDArray[np.int32]
    turn: Turn
    place: TranscriptPlace
    transcript: Transcript | None
    text: str
    raw: str
    end: str
    messages: list[Message] = field(default_factory=list)  # after the context
    after: DrawnTurn | None = None
    fault: Fault = ""  # why a client may not go on from it

    def chain(self) -> list[DrawnTurn]:
        """Return the turns from the first of this context up to this one."""
        one: DrawnTurn | None = self
        turns: list[DrawnTurn] = []
        while one is not None:
            turns.append(one)
            one = one.before
        return turns[::-1]

    def ids(self) -> NDArray[np.int32]:
        """Return all tokens up to the end of this turn. Shape: [T]."""
        return np.concatenate([part for one in self.chain() for part in one.parts()])

    def parts(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the tokens that were observed and those that were drawn. Shape: [T] each."""
        return self.observed, self.turn.tokens

    @property
    def num_tokens(self) -> int:
        """The number of all tokens up to the end of this turn."""
        return sum(len(part) for one in self.chain() for part in one.parts())


def transcript_after(
    prompt: Prompt, before: DrawnTurn | None, ids: NDArray[np.int32]
) -> Transcript:
    """Return a transcript whose next turn follows these tokens, which `before` goes before.

    The engine goes on in the transcript of `before`, if nothing else does. Else a new one begins,
    in which the turns before are observed.
    """
    if before is None:
        is_prompt = np.array_equal(ids, prompt.tokens)
        return Transcript(prompt, None if is_prompt else ids)
    transcript, before.transcript = before.transcript, None
    if transcript is None:
        first = before.chain()[0].observed
        transcript = Transcript(prompt, None if np.array_equal(first, prompt.tokens) else first)
        transcript.observe(before.ids()[len(first) :])
    transcript.observe(ids)
    return transcript


class Branches:
    """Chooses what is learned of an episode: `ALL`, `MAIN`, or what a function says of a sample.

    The main branch is the conversation that led to the last reply, in all contexts that it had
    because a template rewrote it. What is not chosen is left out, and claims no turn.
    """

    def __init__(self, learn: str | Callable[[Sample], Any] = ALL) -> None:
        self._learn = learn

    def samples(self, prompt: Prompt, turns: Sequence[DrawnTurn], decode: Decode) -> list[Sample]:
        """Return the samples that are learned from. Raises: EpisodeFailure for a wrong function."""
        ends = leaves_of(turns)
        if self._learn == MAIN:
            ends = main_ends(turns)
        elif not isinstance(self._learn, str):
            ends = [end for end in ends if self._chosen(prompt, end, decode)]
        return _samples_of(prompt, ends, decode)

    def _chosen(self, prompt: Prompt, end: DrawnTurn, decode: Decode) -> bool:
        """Ask the user's function about a branch with all its turns."""
        assert not isinstance(self._learn, str)
        (sample,) = _samples_of(prompt, [end], decode)
        with blaming("agent", "agent.learn"):
            chosen = self._learn(sample)
        if not isinstance(chosen, (bool, np.bool_)):
            problem = f"agent.learn returned {chosen!r}"[:400]
            raise EpisodeFailure("agent", f"{problem}: expected True or False")
        return bool(chosen)


def leaves_of(turns: Sequence[DrawnTurn]) -> list[DrawnTurn]:
    """Return the turns after which nothing was drawn, in the order in which they were drawn."""
    inner = {id(one.before) for one in turns if one.before is not None}
    return [one for one in turns if id(one) not in inner]


def main_ends(turns: Sequence[DrawnTurn]) -> list[DrawnTurn]:
    """Return the last turn, and before it the end of each context that led to it."""
    ends: list[DrawnTurn] = []
    end = turns[-1] if turns else None
    while end is not None:
        ends.append(end)
        end = end.chain()[0].after
    return ends[::-1]


def _samples_of(prompt: Prompt, ends: Sequence[DrawnTurn], decode: Decode) -> list[Sample]:
    """Return the branches that end with these turns as samples.

    Every turn is learned once, in the first branch that holds it. In others it is observed. Texts
    of turns that came as token ids alone are decoded.
    """
    learned: set[int] = set()
    samples = []
    for end in ends:
        chain = end.chain()
        first = chain[0].observed
        transcript = Transcript(prompt, None if np.array_equal(first, prompt.tokens) else first)
        transcript.place = end.place
        messages: list[Message] = []
        for one in chain:
            if one.before is not None:
                transcript.observe(one.observed)
            if id(one) in learned:
                transcript.observe(one.turn.tokens)
            else:
                transcript.append(one.turn)
            learned.add(id(one))
            messages += one.messages or _as_messages(one, decode)
        told = {FAULT: end.fault} if end.fault else {}
        samples.append(transcript.sample().replace(metadata={TURNS: messages} | told))
    return samples


def _as_messages(turn: DrawnTurn, decode: Decode) -> list[Message]:
    """Return what came and went as token ids as messages."""
    reply = {"role": MODEL, "content": decode(turn.turn.tokens)}
    if turn.before is None:
        return [reply]
    return [{"role": "tool", "content": decode(turn.observed)}, reply]
