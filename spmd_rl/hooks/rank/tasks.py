"""Tasks that a rank gives its pool of hooks, and the events that come of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.hooks.context import CallInfo
from spmd_rl.hooks.failures import FailureKind
from spmd_rl.hooks.results import Grade
from spmd_rl.hooks.transcript import TurnLimits
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample
from spmd_rl.types.token_data import NO_DATA, TokenData


class SampleTask(msgspec.Struct, frozen=True):
    """Grade one sample by the reward functions that take a sample: by these, or by all."""

    prompt: Prompt
    sample: Sample
    info: CallInfo
    functions: frozenset[int] | None = None


class GroupTask(msgspec.Struct, frozen=True):
    """Grade the samples of a prompt by the reward functions that take a whole group."""

    prompt: Prompt
    samples: Sequence[Sample]
    info: CallInfo
    functions: frozenset[int] | None = None


class EpisodeTask(msgspec.Struct, frozen=True):
    """Have `generate` make what would be sample `index` of the prompt.

    An engine call of the episode's transcript k is a request whose sample index is
    `index + k * num_samples`. `temperature` is that of the samples' log-probs. `progress` is what
    an earlier run of the episode has drawn, as `HookPool.progress` returned it.
    """

    prompt: Prompt
    index: int
    num_samples: int
    temperature: float
    info: CallInfo
    progress: bytes = b""


Task = SampleTask | GroupTask | EpisodeTask


class Graded(msgspec.Struct, frozen=True):
    """A task's grades, one a sample, by the name of the function; what the functions emitted and
    noted, and the seconds that they took.
    """

    task_id: int
    grades: dict[str, list[Grade]]
    metrics: dict[str, float]
    seconds: float
    notes: dict[str, str] = {}


class Failed(msgspec.Struct, frozen=True):
    """A task has failed. `where` names the function and the sample, `problem` ends the sentence.

    `is_spared` says that this ends no run: a shipped grader has met an answer that it cannot grade
    in time, or an episode has failed of what `kind` says: it has raised an EpisodeFailure, was
    late, or has ended its process.
    """

    task_id: int
    where: str
    problem: str
    seconds: float = 0.0
    is_spared: bool = False
    kind: FailureKind | None = None

    @property
    def error(self) -> str:
        return f"{self.where}: {self.problem}"


class EngineCall(msgspec.Struct, frozen=True):
    """An episode asks the engine for a turn, and waits for `HookPool.reply`.

    `past` is all that follows the context in transcript number `transcript`, and `context` is that
    of the transcript, if it is not the prompt. `streams` asks for `HookPool.show` meanwhile.
    `begun` are the first tokens of the turn, where they were drawn before.
    """

    task_id: int
    call_id: int
    transcript: int
    past: TokenData
    limits: TurnLimits
    context: NDArray[np.int32] | None = None
    streams: bool = False
    begun: TokenData = NO_DATA


class TurnCancelled(msgspec.Struct, frozen=True):
    """Nobody waits for the turn of an EngineCall any more."""

    task_id: int
    call_id: int


class EpisodeEnded(msgspec.Struct, frozen=True):
    """An episode has returned its samples, with what it emitted and noted in their `metadata`."""

    task_id: int
    samples: list[Sample]
    seconds: float
    where: str = ""


Event = Graded | Failed | EngineCall | TurnCancelled | EpisodeEnded
