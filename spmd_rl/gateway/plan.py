"""Plan of a call: where in a session it goes on, and the tokens that it adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from spmd_rl.data.render.messages import Message
from spmd_rl.errors import SpmdError
from spmd_rl.gateway.branches import Branches
from spmd_rl.gateway.config import GatewayConfig
from spmd_rl.gateway.dialects.asked import Asked, Refused
from spmd_rl.gateway.follow_template import HeldText, next_prompt
from spmd_rl.gateway.message_tree import Attach, MessageTree, TokenTree
from spmd_rl.gateway.replies import ReplyFormat
from spmd_rl.gateway.turns import DrawnTurn
from spmd_rl.hooks.texts import EpisodeTexts


@dataclass(frozen=True)
class SessionParts:
    """What all sessions of a process share.

    One thread at a time renders long conversations, so that the event loop keeps its turn.
    """

    config: GatewayConfig
    texts: EpisodeTexts
    replies: ReplyFormat
    model: str
    branches: Branches = field(default_factory=Branches)
    long_texts: asyncio.Lock = field(default_factory=asyncio.Lock)


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
    asked: Asked,
) -> Plan:
    """Return where a call goes on. Raises: Refused for messages that the template refuses."""
    if asked.token_ids is not None:
        before, length = token_tree.find(asked.token_ids)
        return Plan(before, asked.token_ids[length:], "", None)
    texts, replies = parts.texts, parts.replies
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
    if asked.extras.tools and not replies.reads_calls:
        raise Refused(
            "tools",
            "it is not known how this model writes tool calls: name a form in "
            "agent.gateway.response_template",
        )
    tools = msgspec.json.encode(list(asked.extras), order="deterministic")
    attach = tree.attach(asked.messages, tools)
    try:
        made = next_prompt(texts, asked.extras, _held(attach), attach.rest, parts.config.template)
    except SpmdError as error:
        raise Refused("messages", str(error)) from error
    before = attach.node.held if attach.node and not made.is_context else None
    return Plan(before, np.array(made.ids, np.int32), made.text, attach)


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
