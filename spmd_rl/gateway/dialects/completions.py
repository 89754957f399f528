"""OpenAI completions: a text or token ids go on, without a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

from spmd_rl.data.logs.form import Json
from spmd_rl.gateway.dialects.chat import DataStream, head, usage
from spmd_rl.gateway.dialects.fields import MAX_TOP, RequestFields, token_ids
from spmd_rl.gateway.dialects.request import (
    PolicyReply,
    Refused,
    ReplyRequest,
    ReplyStart,
    SamplingRules,
    shortest,
)
from spmd_rl.gateway.replies import ReplyPiece
from spmd_rl.gateway.sse import event

MAX_TOKENS = 16  # where a client says none, as OpenAI has it
MAX_PROMPTS = 1024
_NAMES = "cmpl", "text_completion"  # what an id begins with, and the kind of object


def read(body: Json, rules: SamplingRules) -> ReplyRequest:
    """Return what a body asks for. Raises: Refused."""
    fields = RequestFields(body, rules)
    prompts = _prompts(fields.take("prompt", (str, list)))
    sampling, num_choices = fields.sampling(), fields.choices()
    logprobs, echo = fields.take("logprobs", int), fields.take("echo", bool, False)
    _check_logprobs(logprobs, echo, rules)
    fields.only("suffix", "", because="this gateway goes on at the end of a prompt alone")
    only_scores = rules.free and echo and body.get("max_tokens") == 0
    name = "max_tokens"
    num_tokens = fields.take(name, int) if only_scores else fields.number(name)
    names_ids = fields.take("return_tokens_as_token_ids", bool, False)
    fields.neutral()
    asked = fields.request(
        reads_text=True,
        max_tokens=MAX_TOKENS if num_tokens is None else num_tokens,
        sampling=sampling,
        logprobs=logprobs is not None,
        num_top=(logprobs or 0) if rules.free else 0,
        echo=echo,
        names_ids=names_ids,
        **fields.stops_and_usage(),
    )
    return asked.of_each([replace(asked, **one) for one in prompts], num_choices)


def _check_logprobs(logprobs: int | None, echo: bool, rules: SamplingRules) -> None:
    """Raise Refused for log-probs that are not known."""
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP:
        raise Refused("logprobs", f"expected 0 to {MAX_TOP}, got {logprobs}")
    if logprobs is not None and not rules.free and (logprobs > 1 or echo):
        raise Refused("logprobs", "only the log-probs of drawn tokens are known: ask for 0 or 1")


def _prompts(given: Any) -> list[dict[str, Any]]:
    """Return the prompts as fields of what is asked. Raises: Refused."""
    single = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts = [given] if single else given
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise Refused("prompt", f"expected a text, token ids, or a list of 1 to {MAX_PROMPTS}")
    found: list[dict[str, Any]] = []
    for one in prompts:
        if isinstance(one, str):
            found.append({"prompt_text": one})
        elif isinstance(one, list) and one:
            found.append({"token_ids": token_ids("prompt", one)})
        else:
            raise Refused("prompt", "expected texts or token ids")
    return found


def answer(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    """Return the whole answer to one prompt."""
    text = drawn.message["content"]
    if asked.echo:
        prompt = asked.prompt_text
        text = (drawn.texts.decode(drawn.prompt_ids.tolist()) if prompt is None else prompt) + text
    choice = _choice(asked, text) | _ending(asked, drawn)
    if asked.return_token_ids:
        ids = {"prompt_token_ids": drawn.prompt_ids.tolist()}
        choice |= ids | {"token_ids": drawn.data.tokens.tolist(), "spmd": drawn.token_facts()}
    return head(drawn.begun, *_NAMES) | {"choices": [choice], "usage": usage(drawn)}


def _choice(asked: ReplyRequest, text: str) -> Json:
    return {"index": asked.choice, "text": text, "logprobs": None, "finish_reason": None}


def _ending(asked: ReplyRequest, drawn: PolicyReply) -> Json:
    finish = "length" if drawn.finish == "length" else "stop"
    return {"finish_reason": finish, "logprobs": _logprobs(asked, drawn)}


def _logprobs(asked: ReplyRequest, drawn: PolicyReply) -> Json | None:
    """Return columns of the tokens; with `echo` the prompt's come first, of which one has none."""
    if not asked.logprobs:
        return None
    ids = drawn.data.tokens.tolist()
    values: list[float | None] = [*drawn.logprobs]
    tops = drawn.tops(whole=asked.echo) or [[] for _ in ids]
    if asked.echo:
        prompt = drawn.prompt_ids.tolist()
        scored = [] if drawn.scores is None else shortest(drawn.scores.logprobs[: len(prompt) - 1])
        ids, values, tops = [*prompt, *ids], [None, *scored, *values], [[], *tops]
    names = [_name(asked, drawn, token) for token in ids]
    starts = accumulate((len(drawn.texts.decode([token])) for token in ids), initial=0)
    table = {"tokens": names, "token_logprobs": values, "text_offset": [*starts][: len(ids)]}
    rows = [_top(asked, drawn, *one) for one in zip(names, values, tops, strict=True)]
    return table | {"top_logprobs": rows if asked.num_top else None}


def _top(
    asked: ReplyRequest,
    drawn: PolicyReply,
    name: str,
    value: float | None,
    top: list[tuple[int, float]],
) -> Json | None:
    """Return the likeliest tokens of a place by their names, best first, and the drawn one."""
    if value is None:
        return None
    found: dict[str, float] = {}
    for token, one in top:
        found.setdefault(_name(asked, drawn, token), one)  # several may have one text
    found.setdefault(name, value)
    return found


def _name(asked: ReplyRequest, drawn: PolicyReply, token: int) -> str:
    return f"token_id:{token}" if asked.names_ids else drawn.texts.decode([token])


class CompletionStream(DataStream):
    """Events of a stream."""

    def __init__(self, asked: ReplyRequest, begun: ReplyStart) -> None:
        super().__init__(asked, head(begun, *_NAMES))

    def start(self) -> Iterator[bytes]:
        if self._asked.echo and self._asked.prompt_text:
            yield self._chunk(self._asked.prompt_text)

    def piece(self, piece: ReplyPiece) -> Iterator[bytes]:
        yield self._chunk(piece.text)

    def end(self, drawn: PolicyReply) -> Iterator[bytes]:
        yield self._chunk("", **_ending(self._asked, drawn))
        yield from self.usage_and_done(drawn)

    def _chunk(self, text: str, **more: Any) -> bytes:
        return event({**self._head, "choices": [_choice(self._asked, text) | more]})
