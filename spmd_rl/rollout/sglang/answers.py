"""Answers of the scheduler: its messages become new tokens, finished samples, or partial ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spmd_rl.errors import SpmdError
from spmd_rl.model.layers.route_shape import RouteShape
from spmd_rl.rollout.engine import StepOutput
from spmd_rl.rollout.sglang.requests import Key, OpenRequest, RequestTable, joined, status_of
from spmd_rl.rollout.sglang.returned_routes import decoded
from spmd_rl.rollout.sglang.structs import (
    AbortReq,
    BatchTokenIDOutput,
    SchedulerMessage,
    TensorMessage,
    token_ids,
)
from spmd_rl.types.prompts import prompt_name
from spmd_rl.types.samples import Sample, SampleStatus


@dataclass
class NewTokens:
    """What has come since the last step."""

    uids: list[NDArray[np.int64]] = field(default_factory=list)
    indices: list[NDArray[np.int64]] = field(default_factory=list)
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    finished: list[Sample] = field(default_factory=list)

    def add(self, key: Key, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        self.uids.append(np.full(len(tokens), key[0], np.int64))
        self.indices.append(np.full(len(tokens), key[1], np.int64))
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)

    def output(self) -> StepOutput:
        return StepOutput(
            joined(self.uids, np.int64),
            joined(self.indices, np.int64),
            joined(self.tokens, np.int64),
            joined(self.logprobs, np.float32),
            self.finished,
        )


@dataclass(frozen=True)
class Ending:
    """The rids that were aborted, and whether one that ends by itself meanwhile is finished.

    If it is not, it waits without its last tokens, so that it can be resumed like the others.
    """

    rids: frozenset[str] = frozenset()
    finish: bool = True


NOTHING_ENDS = Ending()


@dataclass(frozen=True)
class Delta:
    """New tokens of one request, and why the scheduler ended it, if it has. Shape: [T].

    `routes` are those of all its rows, once it has ended.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reason: dict[str, Any] | None
    routes: TensorMessage | None = None
    was_retracted: bool = False

    @property
    def is_aborted(self) -> bool:
        return self.reason is not None and self.reason.get("type") == "abort"


class AnswerCollector:
    """Adds what the scheduler sends to the requests of `table`.

    `abort` ends a request in the scheduler by its rid. It is called for one that has reached a stop
    which the scheduler does not know.
    """

    def __init__(self, table: RequestTable, abort: Callable[[str], None]) -> None:
        self._table = table
        self._abort = abort
        self._new = NewTokens()
        self.num_tokens = 0

    @property
    def has_finished(self) -> bool:
        """Whether samples wait for the next step."""
        return bool(self._new.finished)

    def pop(self) -> NewTokens:
        """Return what has come since the last call."""
        new, self._new = self._new, NewTokens()
        return new

    def add(self, message: SchedulerMessage, version: int, ending: Ending = NOTHING_ENDS) -> None:
        """Add one message, whose tokens the weights `version` drew.

        Raises: SpmdError for a message that nobody asked for, or tokens without log-probs;
        DataError for a request that the scheduler refuses.
        """
        if isinstance(message, AbortReq) and self._abort_waiting(message.rid or "", ending):
            return
        if not isinstance(message, BatchTokenIDOutput):
            problem = getattr(message, "abort_message", "") or ""
            name = type(message).__name__
            raise SpmdError(f"SGLang's scheduler sent {name} unasked {problem}".rstrip())
        for row, rid in enumerate(message.rids):
            if (one := self._table.running(rid)) is not None:
                delta = _delta(message, row)
                _check(one, delta, version)
                self._extend(one, delta, version, ending)

    def _abort_waiting(self, rid: str, ending: Ending) -> bool:
        """Note that a request ended in the scheduler's queue; return whether that was asked for."""
        one = self._table.running(rid)
        if one is not None and one.is_stopped:
            self._end_aborted(one, ending.finish or rid not in ending.rids)
        elif rid in ending.rids:
            self._wait_again(rid)
        else:
            return False
        return True

    def _extend(self, one: OpenRequest, delta: Delta, version: int, ending: Ending) -> None:
        """Give one request its new tokens, and finish it if they are its last."""
        waits = one.rid in ending.rids
        may_finish = ending.finish or not waits
        if one.is_stopped:  # it runs for its routes alone
            if delta.reason is not None:
                self._note_routes(one, delta)
                self._end_aborted(one, may_finish)
            return
        ends = delta.reason is not None and not (waits and delta.is_aborted)
        if ends and not may_finish:
            self._note_routes(one, delta)
            self._wait_again(one.rid)
            return
        is_stopped = one.extend(delta.tokens, delta.logprobs, version)
        new = one.new[-1]
        self.num_tokens += len(new)
        if may_finish:
            self._new.add(one.key, new.tokens, new.logprobs)
        self._note_routes(one, delta)
        if is_stopped and may_finish:
            if delta.reason is None:
                self._abort(one.rid)
            if delta.reason is not None or not one.request.sampling.replay_routes:
                self._finish(one, "completed")
        elif ends and delta.reason is not None:
            self._finish(one, status_of(delta.reason, one.request))
        elif waits and delta.is_aborted:
            self._end_aborted(one, may_finish)

    def _note_routes(self, one: OpenRequest, delta: Delta) -> None:
        """Give the tokens of a request that has ended their routes."""
        if delta.routes is not None:
            shape = RouteShape.required(self._table.spec)
            rows = decoded(self._table.spec, shape, delta.routes)
            one.note_routes(rows, not delta.was_retracted, shape.num_layers)

    def _end_aborted(self, one: OpenRequest, may_finish: bool) -> None:
        """Have a request wait again. An abort hides that the last token was the sample's last."""
        status = self._table.status_by_last_token(one)
        if status is None:
            self._wait_again(one.rid)
        elif may_finish:
            self._finish(one, status)
        else:
            one.drop_last_token()
            self._wait_again(one.rid)

    def _finish(self, one: OpenRequest, status: SampleStatus) -> None:
        self._table.remove(one)
        self._new.finished.append(one.answered().sample(status))

    def _wait_again(self, rid: str | None) -> None:
        one = self._table.running(rid or "")
        if one is not None:
            self._table.stop_running(one)


def _delta(message: BatchTokenIDOutput, row: int) -> Delta:
    """Return what a message says of its request at `row`."""

    def of_row(values: Sequence[Any] | None) -> Any:
        return values[row] if values else None

    return Delta(
        token_ids(message.output_ids[row]),
        np.array(of_row(message.output_token_logprobs_val) or [], np.float32),
        message.finished_reasons[row],
        of_row(message.routed_experts),
        bool(of_row(message.retraction_counts)),
    )


def _check(one: OpenRequest, delta: Delta, version: int) -> None:
    """Raises: SpmdError if a token has no log-prob, or one that is NaN."""
    where = f"{prompt_name(one.request.uid)}, sample {one.request.index}"
    if len(delta.tokens) != len(delta.logprobs):
        counts = f"{len(delta.logprobs)} log-probs of {len(delta.tokens)} tokens"
        raise SpmdError(f"SGLang's scheduler sent {counts}: {where}")
    if np.isnan(delta.logprobs).any():
        raise SpmdError(f"weights version {version} give NaN logits: {where}")
