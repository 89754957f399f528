"""Messages between a rank and a process of hooks. On the wire each is an array that begins with
the name of its class.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.controller.channel.codec import Codec
from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.failures import FailureKind
from spmd_rl.hooks.results import Grade
from spmd_rl.hooks.signatures import RewardForm
from spmd_rl.hooks.transcript import Turn, TurnLimits
from spmd_rl.types.prompts import PromptColumns
from spmd_rl.types.samples import SampleColumns
from spmd_rl.types.token_data import TokenData

CLOSE_S = 3.0  # for a program of episodes to close, as its process ends
DAMAGED_EXIT = 77  # exit code after a hook has closed descriptors of its process


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Start(Message, frozen=True):
    """The first message to a process: what it imports, and the deadlines of its calls.

    `rank` is that of the worker, and `model` the folder of the run's model.
    """

    rewards: list[str]
    generate: str
    config: dict[str, Any]
    rank: int
    model: str
    concurrency: int
    deadline_s: float
    episode_deadline_s: float


class Ready(Message, frozen=True):
    """All hooks are imported, and `forms` are those of the rewards; or why one cannot be used.

    A program of episodes has been opened, too.
    """

    forms: list[RewardForm]
    error: str = ""


class CallRow(msgspec.Struct, frozen=True, array_like=True):
    """A call of reward function number `function`, for a prompt and `num_samples` samples from
    `first_sample` on of the same message.
    """

    call_id: int
    function: int
    info: CallInfo
    prompt: int
    first_sample: int
    num_samples: int


class Calls(Message, frozen=True):
    """Calls of reward functions. Each prompt and each sample is in here once."""

    calls: list[CallRow]
    prompts: PromptColumns
    samples: SampleColumns


class Episode(Message, frozen=True):
    """A call of `generate`, to make sample `index` of `num_samples` of one prompt.

    `results` are those that an earlier run of the episode has kept.
    """

    call_id: int
    info: CallInfo
    index: int
    num_samples: int
    temperature: float
    prompts: PromptColumns
    results: dict[str, bytes]


class Cancel(Message, frozen=True):
    """End an async call, which answers with a Problem as any other."""

    call_id: int


class Reply(Message, frozen=True):
    """The turn that an episode asked for, or the problem why there is none."""

    call_id: int
    ask_id: int
    problem: str = ""
    turn: Turn | None = None


class DrawnTokens(Message, frozen=True):
    """Token ids that the engine has just added to a turn whose episode wants to see them."""

    call_id: int
    ask_id: int
    tokens: list[int]


class Result(Message, frozen=True):
    """What a call returned, and the seconds that it took: grades, or the samples of an episode.

    `retires` says that the process is to get no other call.
    """

    call_id: int
    seconds: float
    grades: list[Grade]
    metrics: dict[str, float] = {}
    notes: dict[str, str] = {}
    retires: bool = False
    samples: SampleColumns | None = None


class Problem(Message, frozen=True):
    """Why a call failed: the end of a sentence about it. `retires` is that of Result.

    `in_doubt` says that another call may be the reason. `unanswered` says that the process ended,
    or the call was ended at its deadline, before there was an answer. `kind` is what failed, of an
    episode.
    """

    call_id: int
    seconds: float
    problem: str
    in_doubt: bool = False
    retires: bool = False
    unanswered: bool = False
    kind: FailureKind | None = None


Answer = Result | Problem  # the last word on a call


class Answers(Message, frozen=True):
    """Calls that have ended."""

    answers: list[Answer]


class AskTurn(Message, frozen=True):
    """Ask the engine to go on with transcript number `transcript`, after `past`.

    `context` stands in place of the prompt's tokens. `streams` asks for DrawnTokens meanwhile.
    """

    call_id: int
    ask_id: int
    transcript: int
    past: TokenData
    limits: TurnLimits
    context: NDArray[np.int32] | None = None
    streams: bool = False


class CancelTurn(Message, frozen=True):
    """Ask the engine to stop drawing a turn, for which nobody waits any more."""

    call_id: int
    ask_id: int


class KeepResult(Message, frozen=True):
    """Keep a result of an episode for later runs of it. `value` is the result as msgpack."""

    call_id: int
    name: str
    value: bytes


ToProcess = Start | Calls | Episode | Cancel | Reply | DrawnTokens
ToRank = Ready | Answers | AskTurn | CancelTurn | KeepResult
TO_PROCESS: Codec = Codec(ToProcess, functions=False, repeats=False)
TO_RANK: Codec = Codec(ToRank, functions=False, repeats=False)
