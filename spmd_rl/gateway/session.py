"""Session of an episode: what its agents ask the policy, and the samples that come of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Literal, NamedTuple

from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
)
from spmd_rl.gateway.message_tree import MessageTree, Reason, TokenTree
from spmd_rl.gateway.metrics import CallEnd
from spmd_rl.gateway.plan import Plan, SessionParts, make_plan
from spmd_rl.gateway.reply_call import ReplyCall, ReplyDecoder
from spmd_rl.gateway.turn_source import SourceTurn, TurnSource
from spmd_rl.gateway.turns import DrawnTurn, transcript_after
from spmd_rl.hooks.context import HookContext
from spmd_rl.hooks.transcript import Transcript, Turn
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import Sample

MAX_ANSWERED = 64  # answered calls that a retry may ask for again
MAX_UNANSWERED = 4096  # requests without an answer, whose retries are draws of their own
NO_TURNS = "max_turns_reached"  # code of a refusal
REWRITTEN = "rewritten_turns"  # metric of an episode: the share of calls after a changed past


class AgentCall(NamedTuple):
    """A call of a session. `reason` says how it went on; "tokens" came as token ids.

    `num_cached` counts the tokens of the prompt that the session held before.
    """

    reason: Reason | Literal["tokens"]
    end: CallEnd
    num_prompt: int
    num_cached: int
    num_drawn: int
    rewritten: bool


class Session:
    """What the agents of one episode share: a key, and the conversations that they hold.

    `base_url` is for OpenAI's clients; Anthropic's append the version themselves, so they take
    `root_url`. The URLs with the key in them are for clients that can send no key.
    """

    def __init__(
        self,
        parts: SessionParts,
        key: str,
        root_url: str,
        ctx: HookContext,
        prompt: Prompt,
        source: TurnSource,
        rules: SamplingRules,
        max_turns: int,
        forget: Callable[[Session], None],
    ) -> None:
        self.key, self.root_url, self.rules = key, root_url, rules
        self.base_url = f"{root_url}/v1"
        self.keyed_root_url = f"{root_url}/s/{key}"
        self.keyed_base_url = f"{self.keyed_root_url}/v1"
        self.names: list[str] = []  # by which the shared key finds it
        self.version = ctx.version
        self.records: list[
            AgentCall
        ] = []  # of the calls that have ended, in the order of their ends
        self.is_over = False  # a call was refused because the episode has had all its turns
        self._max_turns = max_turns
        self._parts, self._ctx, self._prompt, self._source = parts, ctx, prompt, source
        self._tree: MessageTree[DrawnTurn] = MessageTree()
        self._token_tree: TokenTree[DrawnTurn] = TokenTree()
        self._turns: list[DrawnTurn] = []
        self._open: set[ReplyCall] = set()
        self._calls: dict[bytes, list[ReplyCall]] = {}  # open or answered, by request
        self._answered: deque[tuple[bytes, ReplyCall]] = deque()
        self._unanswered: deque[bytes] = deque(maxlen=MAX_UNANSWERED)
        self._num_calls = 0
        self._forget = forget
        self._closed = False

    def samples(self) -> list[Sample]:
        """Return what is learned as samples, one for each branch; every turn is learned once.

        Raises: EpisodeFailure where the user's function that chooses branches fails.
        """
        return self._parts.branches.samples(self._prompt, self._turns, self._parts.texts.decode)

    def close(self) -> None:
        """Refuse further calls and give up those that are open. The key is dead."""
        if self._closed:
            return
        self._closed = True
        self._forget(self)
        for call in list(self._open):
            call.task.cancel()
        if self.records:
            share = sum(one.rewritten for one in self.records) / len(self.records)
            self._ctx.emit(REWRITTEN, share)

    def count_tokens(self, asked: ReplyRequest) -> int:
        """Return how many tokens the prompt of a request has. Raises: Refused."""
        plan = self._plan(asked)
        return plan.num_cached + len(plan.ids)

    def ask(
        self, asked: ReplyRequest, request: bytes, *, again: bool, num_bytes: int = 0
    ) -> ReplyCall:
        """Begin to draw a reply, and return the call, which the caller joins.

        `request` is what the client sent, or stands for it; `num_bytes` says how much that was.
        With `again`, which a client says of a retry, the call of an equal one is returned. Else
        equal requests are draws of their own, also at once.
        Raises: Refused, while too many calls wait, after the last turn, or after the end.
        """
        if self._closed:
            raise Refused("", "the session has ended", status=401)
        tag = blake2b(request, digest_size=16).digest()
        if again and (known := self._tried_before(tag)) is not None:
            return known
        if 0 < self._max_turns <= len(self._turns) + len(self._open):
            self.is_over = True
            problem = f"the episode has had its {self._max_turns} turns (agent.max_turns)"
            raise Refused("", problem, code=NO_TURNS)
        if len(self._open) >= self._parts.config.max_waiting:
            self._unanswered.append(tag)
            problem = f"{len(self._open)} calls of this session wait for the engine already"
            raise Refused("", problem, status=429, retry_after_s=1)
        call = ReplyCall(asked, max(num_bytes, len(request)))
        self._calls.setdefault(tag, []).append(call)
        self._open.add(call)
        self._parts.counts.num_open += 1
        call.start(asyncio.get_running_loop().create_task(self._draw(call)))
        call.task.add_done_callback(lambda task: self._ended(call, tag, task))
        return call

    def _tried_before(self, tag: bytes) -> ReplyCall | None:
        """Return the call whose answer a retry asks for; None where its first try got no call.

        Of equal calls it is the one with the fewest claims: its answer may be the one that a client
        has missed.
        """
        calls = self._calls.get(tag, ())
        call = min(calls, key=lambda one: one.num_claims, default=None)
        if tag in self._unanswered and (call is None or call.num_claims):
            self._unanswered.remove(tag)
            return None
        return call

    def leave(self, call: ReplyCall, *, answered: bool = False) -> None:
        """Note that a client has left, with its answer or without.

        A call for which nobody waits is given up.
        """
        if call.leave(answered=answered):
            call.task.cancel()

    def _ended(self, call: ReplyCall, tag: bytes, task: asyncio.Task[PolicyReply]) -> None:
        self._open.discard(call)
        self._parts.counts.num_open -= 1
        if task.cancelled() or task.exception() is not None:
            self._drop(tag, call)
            self._unanswered.append(tag)
            return
        self._answered.append((tag, call))
        if len(self._answered) > MAX_ANSWERED:
            self._drop(*self._answered.popleft())

    def _drop(self, tag: bytes, call: ReplyCall) -> None:
        """Forget a call."""
        calls = self._calls[tag]
        calls.remove(call)
        if not calls:
            del self._calls[tag]

    async def _draw(self, call: ReplyCall) -> PolicyReply:
        """Draw the reply of a call. Raises: Refused, SpmdError; CancelledError when given up."""
        asked = call.asked
        plan = await self._parts.work(call.num_bytes, self._plan, asked)
        begun = self._begin(plan)
        call.begun.set_result(begun)
        drawing = ReplyDecoder(self._parts, asked, plan, begun.id, self.rules)
        transcript = transcript_after(self._prompt, plan.before, plan.ids)
        end: CallEnd = "failed"
        got: SourceTurn | None = None
        try:
            got = await self._source.draw(
                transcript,
                asked,
                _limit(asked.max_tokens, self._parts.texts.context_tokens - begun.num_prompt),
                (lambda ids: call.add(drawing.add(ids))) if asked.stream else None,
            )
            begun = begun._replace(num_cached=max(begun.num_cached, got.num_cached))
            end = "answered"
        except asyncio.CancelledError:
            end = "lost"
            raise
        finally:
            self._note(plan, begun, end, 0 if got is None else len(got.turn.tokens))
        call.add(drawing.finish(got.turn))
        self._keep(plan, drawing, got.turn, transcript)
        return drawing.drawn(begun, got, plan.prompt_ids)

    def _keep(self, plan: Plan, drawing: ReplyDecoder, turn: Turn, transcript: Transcript) -> None:
        """Keep a turn, which later calls may go on from."""
        assert transcript.place is not None  # the engine has drawn in it
        drawn = DrawnTurn(
            plan.before,
            plan.ids,
            turn,
            transcript.place,
            transcript,
            text=plan.text + drawing.raw + drawing.end,
            raw=drawing.opening + drawing.raw,
            end=drawing.end,
            fault=drawing.fault,
        )
        self._turns.append(drawn)
        if plan.attach is not None:
            if plan.before is None:
                drawn.after = plan.follows
            drawn.messages = [*(plan.attach.rest if plan.before else ()), drawing.message]
            self._tree.add(plan.attach, drawing.message, drawn)
        else:
            self._token_tree.add(drawn.ids(), drawn)

    def _begin(self, plan: Plan) -> ReplyStart:
        """Return the first facts of a reply. Raises: Refused where the context has no room."""
        num_cached = plan.num_cached
        num_prompt, most = num_cached + len(plan.ids), self._parts.texts.context_tokens
        if num_prompt >= most:
            if plan.follows is not None:
                plan.follows.fault = "context"
            raise Refused(
                "messages",
                f"prompt is too long: {num_prompt} tokens > {most - 1} maximum",
                code="context_length_exceeded",
            )
        # equal calls of equal episodes have equal ids
        facts = self._prompt.uid, self._ctx.sample_index, self._num_calls, self._ctx.seed
        self._num_calls += 1
        name = blake2b(repr(facts).encode(), digest_size=12).hexdigest()
        return ReplyStart(name, int(time.time()), self._parts.model, num_prompt, num_cached)

    def _plan(self, asked: ReplyRequest) -> Plan:
        return make_plan(self._parts, self._tree, self._token_tree, asked)

    def _note(self, plan: Plan, begun: ReplyStart, end: CallEnd, num_drawn: int) -> None:
        attach = plan.attach
        rewritten = attach is not None and (
            attach.reason in ("rewritten", "tools changed")
            or (attach.node is not None and plan.before is None)
        )
        reason = attach.reason if attach is not None else "tokens"
        numbers = begun.num_prompt, begun.num_cached, num_drawn
        self._parts.counts.add(end, *numbers)
        self.records.append(AgentCall(reason, end, *numbers, rewritten))


def _limit(asked: int | None, room: int) -> int | None:
    return None if asked is None else min(asked, room)
