"""Plan of a call: where in a session it goes on, and the tokens that it adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.request import Refused, ReplyRequest
from spmd_rl.gateway.follow_template import HeldText, next_prompt
from spmd_rl.gateway.message_tree import Attach, MessageTree, TokenTree
from spmd_rl.gateway.metrics import CallCounts
from spmd_rl.gateway.replies import ReplyFormat
from spmd_rl.gateway.turns import Branches, DrawnTurn
from spmd_rl.hooks.texts import EpisodeTexts

T = TypeVar("T")
LONG_BYTES = 1 << 16  # of a request; a longer one is read and rendered outside of the event loop


@dataclass(frozen=True)
class SessionParts:
    """What all sessions of a process share. `settings` is what the names of settings begin with."""

    config: GatewayConfig
    texts: EpisodeTexts
    replies: ReplyFormat
    model: str
    branches: Branches = field(default_factory=Branches)
    settings: str = "agent.gateway"
    counts: CallCounts = field(default_factory=CallCounts)
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "long requests")
    )

    async def work(self, size: int, do: Callable[..., T], *given: Any) -> T:
        """Return what a function makes of a request of this size.

        One thread does all long ones in turn, so that the event loop keeps its turn.
        """
        if size <= LONG_BYTES:
            return do(*given)
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(do, *given))


class Plan(NamedTuple):
    """Where a call goes on, and the ids and the text that it adds."""

    before: DrawnTurn | None
    ids: NDArray[np.int32]
    text: str
    attach: Attach[DrawnTurn] | None

    @property
    def num_cached(self) -> int:
        return self.before.num_tokens if self.before else 0

    @property
    def follows(self) -> DrawnTurn | None:
        """The turn whose messages the call goes on from, also where the template rewrites them."""
        if self.before is None and self.attach is not None and self.attach.node is not None:
            return self.attach.node.held
        return self.before

    def prompt_ids(self) -> NDArray[np.int32]:
        return np.concatenate([*([self.before.ids()] if self.before else []), self.ids])


def make_plan(
    parts: SessionParts,
    tree: MessageTree[DrawnTurn],
    token_tree: TokenTree[DrawnTurn],
    asked: ReplyRequest,
) -> Plan:
    """Return where a call goes on. Raises: Refused for messages that the template refuses."""
    texts = parts.texts
    if (ids := _token_ids(texts, asked)) is not None:
        before, length = token_tree.find(ids)
        return Plan(before, ids[length:], "", None)
    _check_shown(parts, asked)
    tools = msgspec.json.encode(list(asked.extras), order="deterministic")
    attach = tree.attach(asked.messages, tools)
    try:
        made = next_prompt(texts, asked.extras, _held(attach), attach.rest, parts.config.template)
    except SpmdError as error:
        raise Refused("messages", str(error).removeprefix("messages: ")) from error
    before = attach.node.held if attach.node and not made.is_context else None
    return Plan(before, np.array(made.ids, np.int32), made.text, attach)


def _token_ids(texts: EpisodeTexts, asked: ReplyRequest) -> NDArray[np.int32] | None:
    """Return the token ids of a prompt that has no messages; None of one that has. Shape: [T]."""
    if asked.prompt_text is None:
        return asked.token_ids
    ids = np.array(texts.encode(asked.prompt_text, special_tokens=True), np.int32)
    if not len(ids):
        raise Refused("prompt", "expected a text of at least one token")
    return ids


def _check_shown(parts: SessionParts, asked: ReplyRequest) -> None:
    """Raise Refused where the chat template leaves out what is asked."""
    texts = parts.texts
    if texts.chat_template is None:
        raise Refused("messages", "this model has no chat template: send token ids")
    if not _is_shown(lambda: texts.shows_texts):
        raise Refused(
            "messages",
            "the chat template of this model leaves out texts: it wants the content in parts",
        )
    if asked.extras.tools and not _is_shown(lambda: texts.shows_tools):
        raise Refused(
            "tools",
            "the chat template of this model leaves out tools: give its folder a template with "
            "them, or describe them in a message and read calls from the text",
        )
    if asked.extras.tools and not parts.replies.reads_calls:
        raise Refused(
            "tools",
            "it is not known how this model writes tool calls: name a form in "
            f"{parts.settings}.response_template",
        )


def _is_shown(asked: Callable[[], bool]) -> bool:
    """Whether the chat template shows something. What it refuses, it refuses of each request."""
    try:
        return asked()
    except SpmdError:
        return True


def _held(attach: Attach[DrawnTurn]) -> HeldText | None:
    """Return the text and the messages up to the reply after which a call goes on."""
    if attach.node is None:
        return None
    messages: list[Message] = []
    replies: dict[int, str] = {}
    for node in attach.node.path():
        messages += node.messages
        replies[len(messages) - 1] = node.held.raw
    held = attach.node.held
    return HeldText(messages, replies, "".join(one.text for one in held.chain()), held.end)
