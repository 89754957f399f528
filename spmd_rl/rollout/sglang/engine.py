"""The SGLang engine: requests go to the scheduler in the child, and its tokens come back.

A push has every token drawn by one known version. It aborts all requests and keeps their partial
answers, waits until the scheduler is idle, loads, and starts the requests again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

import torch

from spmd_rl.errors import DeadlineError, SpmdError
from spmd_rl.model.spec import ModelSpec
from spmd_rl.offload.residency import Receipt
from spmd_rl.rollout.engine import Request, StepOutput
from spmd_rl.rollout.sglang.answers import AnswerCollector, Ending
from spmd_rl.rollout.sglang.child_calls import SETTLE
from spmd_rl.rollout.sglang.client import SchedulerClient
from spmd_rl.rollout.sglang.config import SglangEngineConfig
from spmd_rl.rollout.sglang.launch import Child
from spmd_rl.rollout.sglang.messages import ChildReady
from spmd_rl.rollout.sglang.rank_engine import RankEngine
from spmd_rl.rollout.sglang.requests import OpenRequest, RequestTable
from spmd_rl.rollout.sglang.sink import SglangSink
from spmd_rl.rollout.sglang.structs import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
)
from spmd_rl.types.samples import Sample
from spmd_rl.weights.plan.layout import Box

POLL_S = 0.2  # how long a step waits for tokens; the child's end is noticed at once


class SglangEngine(RankEngine):
    """Implements `rollout.engine.Engine` over the scheduler of one child."""

    def __init__(
        self,
        child: Child,
        client: SchedulerClient,
        ready: ChildReady,
        cfg: SglangEngineConfig,
        spec: ModelSpec,
        boxes: Mapping[str, Box],
        *,
        dtype: str,
        device: torch.device,
        decode: Callable[[tuple[int, ...]], str] | None = None,
        returns_routes: bool = False,
    ) -> None:
        """`ready` is what `child` said. `boxes` are its parts of the weights, which a push brings
        in `dtype`. Requests may ask for routes if the child `returns_routes`.
        """
        super().__init__(child, cfg)
        self.start_seconds = ready.seconds
        self.max_kv_tokens = ready.max_num_tokens
        self.client = client
        self.spec = spec
        self._sink = SglangSink(
            self,
            child,
            client,
            spec.parameter_shapes(),
            boxes,
            dtype,
            device,
            slab_bytes=cfg.slab_bytes,
            deadline_s=cfg.answer_deadline_s,
        )
        self._table = RequestTable(
            spec,
            ready.max_num_tokens,
            decode,
            version=ready.version,
            returns_routes=returns_routes,
        )
        self._answers = AnswerCollector(self._table, self._abort)
        self._last_heard_s = time.monotonic()
        self._num_steps = 0
        self._num_aborted = 0

    @property
    def has_work(self) -> bool:
        return bool(len(self._table) or self._answers.has_finished)

    @property
    def load(self) -> tuple[int, int]:
        num_running = self._table.num_running
        return num_running, len(self._table) - num_running

    def submit(self, request: Request) -> None:
        added = self._table.add(request)
        if self.state.can_generate:
            self._start([added])

    def step(self) -> StepOutput:
        """Return what the scheduler has sent since the last step.

        Blocks: until something comes, for at most POLL_S.
        Raises: LostRankError when the child has ended; DeadlineError when it is silent for too
        long.
        """
        version = self.state.require_generate()
        wait_s = 0.0 if self._answers.has_finished or not len(self._table) else POLL_S
        while (message := self.client.receive(wait_s)) is not None:
            self._last_heard_s = time.monotonic()
            self._answers.add(message, version)
            wait_s = 0.0
        self._check_not_silent()
        self._num_steps += 1
        return self._answers.pop().output()

    def abort(self, uid: int | None = None, index: int | None = None) -> list[Sample]:
        """End the requests of `uid` and `index`, and return their unfinished samples.

        A request that ends by itself meanwhile lacks its last tokens, so that it can be resumed.
        Blocks: until the scheduler has answered; engine.answer_deadline_s ends it.
        """
        matching = self._table.matching(uid, index)
        self._end_running([one for one in matching if one.rid], finish=False)
        for one in matching:
            self._table.remove(one)
        if uid is None and index is None:
            self._answers.pop()
        return [one.answered().sample("aborted") for one in matching]

    def sleep(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Give the KV memory back, and the weights too if they are to sleep. The child counts its
        memory itself, so there is no receipt.

        Blocks: until the scheduler is idle and has given it back.
        """
        if not self.state.is_asleep:
            self._become_idle()
        if names := self.state.begin_sleep(self._table.num_running, tags):
            self.client.request(
                ReleaseMemoryOccupationReqInput(tags=names),
                ReleaseMemoryOccupationReqOutput,
                self.cfg.answer_deadline_s,
            )
            # the first scheduler of a group answers for itself alone
            self.client.start_call(SETTLE)
            self.client.finish_call(SETTLE, self.cfg.answer_deadline_s)
        return []

    def wake(self, tags: tuple[str, ...] = ()) -> list[Receipt]:
        """Take the memory again, and go on if the weights did not sleep. Blocks: until it has."""
        if names := self.state.begin_wake(tags):
            self.client.request(
                ResumeMemoryOccupationReqInput(tags=names),
                ResumeMemoryOccupationReqOutput,
                self.cfg.answer_deadline_s,
            )
        if self.state.can_generate:
            self._start(self._table.waiting())
        return []

    def snapshot(self) -> list[Sample]:
        """Return every unfinished sample with the tokens that came so far."""
        return [one.answered().sample("aborted") for one in self._table.matching(None, None)]

    def open_push(self) -> None:
        """Keep the partial answers of all requests, and generate nothing until `commit_push`.

        Blocks: until the scheduler is idle. It may be called again.
        """
        if not self.state.is_pushing:
            self.state.check_awake()
            if not self.state.is_asleep:  # else it became idle before it slept
                self._become_idle()
            self.state.begin_push()

    def commit_push(self, version: int) -> None:
        """Start all requests again with the weights that were pushed, as `version`: at once, or
        when the keys and values wake.
        """
        self.state.end_push(version)
        if self.state.can_generate:
            self._start(self._table.waiting())

    def stats(self) -> dict[str, int]:
        num_running, num_waiting = self.load
        return {
            "num_steps": self._num_steps,
            "num_generated_tokens": self._answers.num_tokens,
            "num_aborted": self._num_aborted,
            "num_running": num_running,
            "num_waiting": num_waiting,
        }

    def close(self) -> None:
        """End the child. The engine is of no use after that."""
        self.child.stop()
        self.client.close()

    def _start(self, requests: Iterable[OpenRequest]) -> None:
        self._last_heard_s = time.monotonic()
        for one in requests:
            self.client.send(self._table.start(one))

    def _become_idle(self) -> None:
        """End all that runs, keep it to be started again, and wait until the scheduler is idle."""
        running = [one for one in self._table.matching(None, None) if one.rid]
        self._end_running(running, finish=True)
        deadline_s = self.cfg.answer_deadline_s
        flush = FlushCacheReqInput(timeout_s=deadline_s)
        answer = self.client.request(flush, FlushCacheReqOutput, deadline_s + POLL_S)
        if not answer.success:
            raise SpmdError(f"SGLang's scheduler did not become idle: {answer.message}")

    def _end_running(self, requests: list[OpenRequest], finish: bool) -> None:
        """Have the scheduler end running requests; they wait then, with the tokens that came.

        One that ends by itself meanwhile is finished if `finish` says so, else it waits too.
        """
        if not requests:
            return
        if len(requests) == self._table.num_running:
            self.client.send(AbortReq(rid="", abort_all=True))
        else:
            for one in requests:
                self._abort(one.rid)
        version = self.state.require_generate()
        ending = Ending(frozenset(one.rid for one in requests), finish)
        end = time.monotonic() + self.cfg.answer_deadline_s
        while num_left := len(ending.rids & self._table.rids):
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"SGLang's scheduler did not end {num_left} requests within "
                    f"engine.answer_deadline_s = {self.cfg.answer_deadline_s:g}"
                )
            if (message := self.client.receive(left_s)) is not None:
                self._answers.add(message, version, ending)
        self._num_aborted += len(requests)

    def _abort(self, rid: str) -> None:
        self.client.send(AbortReq(rid=rid))

    def _check_not_silent(self) -> None:
        """Raises: DeadlineError when requests run and nothing has come for too long."""
        silent_s = time.monotonic() - self._last_heard_s
        if self._table.num_running and silent_s > self.cfg.answer_deadline_s:
            raise DeadlineError(
                f"SGLang's scheduler has sent nothing for {silent_s:.0f} s while "
                f"{self._table.num_running} requests run (engine.answer_deadline_s)"
            )
