"""Messages between a rank and a process of hooks. On the wire each is an array that begins with
the name of its class.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.results import Grade
from spmd_rl.hooks.signatures import RewardForm
from spmd_rl.hooks.transcript import Turn
from spmd_rl.types.prompts import PromptColumns
from spmd_rl.types.samples import SampleColumns

DAMAGED_EXIT = 77  # exit code after a hook has closed descriptors of its process
Kind = Literal["plain", "async", "episode"]  # of the functions that one process runs


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Start(Message, frozen=True):
    """The first message to a process: what it imports."""

    rewards: list[str]
    generate: str
    config: dict[str, Any]


class Ready(Message, frozen=True):
    """All hooks are imported; `forms` are those of the rewards."""

    forms: list[RewardForm]


class NotReady(Message, frozen=True):
    """A hook cannot be used."""

    error: str


class Serve(Message, frozen=True):
    """Answer to Ready: the kind of functions that the process runs from now on."""

    kind: Kind
    concurrency: int
    deadline_s: float
    episode_deadline_s: float


class Calls(Message, frozen=True):
    """Calls of reward functions. Call m is for prompt `prompt_of[m]`, and for the `counts[m]`
    samples from `first[m]` on. `functions` are numbers of rewards, in the order of Start.
    """

    ids: list[int]
    functions: list[int]
    infos: list[CallInfo]
    prompt_of: list[int]
    first: list[int]
    counts: list[int]
    prompts: PromptColumns
    samples: SampleColumns


class Result(Message, frozen=True):
    """What a reward function returned for one call, and the seconds that it took. `spoiled` says
    that the process is to get no other call.
    """

    call_id: int
    seconds: float
    grades: list[Grade]
    metrics: dict[str, float]
    notes: dict[str, str] = {}
    spoiled: bool = False


class Answered(Message, frozen=True):
    """So many answers are in the ring now, from the start of the process on (answer_ring.py)."""

    count: int


class Episodes(Message, frozen=True):
    """Calls of `generate`. Call m is for prompt `prompt_of[m]`, and for what would be its sample
    `indices[m]` of `num_samples[m]`.
    """

    ids: list[int]
    infos: list[CallInfo]
    prompt_of: list[int]
    indices: list[int]
    num_samples: list[int]
    temperatures: list[float]
    prompts: PromptColumns


class Cancel(Message, frozen=True):
    """End an async call, which answers with a Problem as any other."""

    call_id: int


class Drawn(Message, frozen=True):
    """Answer to Ask."""

    call_id: int
    ask_id: int
    turn: Turn


class Encoded(Message, frozen=True):
    """Answer to AskTokens."""

    call_id: int
    ask_id: int
    tokens: list[int]


class Text(Message, frozen=True):
    """Answer to AskText or AskRendered."""

    call_id: int
    ask_id: int
    text: str


class Refused(Message, frozen=True):
    """Answer to a question of an episode: why there is none."""

    call_id: int
    ask_id: int
    problem: str


class Problem(Message, frozen=True):
    """Why a call failed: the end of a sentence about it.

    `in_doubt` says that an earlier call may be the reason. `spoiled` says that the process is to
    get no other call. `unanswered` says that its process ended, or was ended at the deadline,
    before there was an answer.
    """

    call_id: int
    seconds: float
    problem: str
    in_doubt: bool = False
    spoiled: bool = False
    unanswered: bool = False


class EpisodeResult(Message, frozen=True):
    """The samples that an episode returned. `spoiled` is that of Result."""

    call_id: int
    seconds: float
    samples: SampleColumns
    metrics: dict[str, float]
    notes: dict[str, str] = {}
    spoiled: bool = False


class Ask(Message, frozen=True):
    """A turn of transcript number `transcript` is wanted, of which the arrays are the past."""

    call_id: int
    ask_id: int
    transcript: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    kept: bytes
    max_tokens: int | None
    stop: list[str] | None


class AskTokens(Message, frozen=True):
    """The token ids of a text are wanted."""

    call_id: int
    ask_id: int
    text: str


class AskText(Message, frozen=True):
    """The text of token ids is wanted."""

    call_id: int
    ask_id: int
    tokens: NDArray[np.int32]


class AskRendered(Message, frozen=True):
    """The text is wanted that the chat template makes of messages, with a generation prompt."""

    call_id: int
    ask_id: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    template_kwargs: dict[str, Any]


Question = AskTokens | AskText | AskRendered  # for the rank's tokenizer
Answer = Result | EpisodeResult | Problem  # the last message of a call
ToProcess = Start | Serve | Calls | Episodes | Cancel | Drawn | Encoded | Text | Refused
ToRank = Ready | NotReady | Answered | Answer | Ask | Question
TO_PROCESS: Codec = Codec(ToProcess, functions=False, repeats=False)
TO_RANK: Codec = Codec(ToRank, functions=False, repeats=False)
