"""Conversation of an episode: chat messages, of which the policy draws the assistant's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.transcript import Transcript, Turn
from spmd_rl.rewards.answers.final_text import (
    THINKING,
    begins_in_thought,
    opens_thought,
    split_thought,
)
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import MODEL, TURNS, Sample


class Conversation:
    """Messages, and the transcripts in which the policy has drawn its turns.

    The policy goes on from what the chat template makes of all messages. Tokens that it drew stay
    as they are, and only what the template adds after them is encoded. Where the template rewrites
    what was before, another transcript begins, whose context is what the template makes of it.

    `messages` may be changed: an assistant's text, say, may be replaced by the calls that it makes.
    Raises: ValueError for a prompt that no chat template has made.
    """

    def __init__(self, prompt: Prompt) -> None:
        if not prompt.chat:
            raise ValueError("a conversation needs a prompt with prompts.chat_template = true")
        self.prompt = prompt
        self.messages: list[dict[str, Any]] = list(prompt.chat["messages"])
        self.transcripts = [Transcript(prompt)]
        self._num_messages = [0]  # so many there were after the last turn of each transcript
        self._text = prompt.text  # of the last transcript, its prompt included

    def add(self, role: str, content: str) -> None:
        """Add a message of the environment, such as a user's or the result of a tool."""
        self.messages.append({"role": role, "content": content})

    async def complete(
        self,
        engine: EpisodeEngine,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Turn:
        """Let the policy draw the next turn, and add its text as an assistant message.

        Arguments, blocking and errors are those of `EpisodeEngine.complete`. SpmdError is also
        raised for messages that the template refuses.
        """
        if len(self.messages) > len(self.prompt.chat["messages"]):
            await self._follow_template(engine)
        turn = await engine.complete(self.transcripts[-1], max_tokens, stop)
        self._text += await engine.decode(turn.tokens)
        self.messages.append({"role": MODEL, "content": turn.text})
        self._num_messages[-1] = len(self.messages)
        return turn

    def samples(self) -> list[Sample]:
        """Return the transcripts as samples, of which most templates make one.

        Their `messages` are the `turns` up to the last one of the transcript.
        """
        first, turns = len(self.prompt.chat["messages"]), self.turns()
        return [
            transcript.sample().replace(metadata={TURNS: turns[: last - first]})
            for transcript, last in zip(self.transcripts, self._num_messages, strict=True)
        ]

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages after the prompt. Where the template has opened a thought, what the
        model said begins with the tag of it.
        """
        opening = THINKING if opens_thought(self.prompt.text) else ""
        return [
            {**turn, "content": opening + turn["content"]}
            if turn.get("role") == MODEL and isinstance(turn.get("content"), str)
            else turn
            for turn in self.messages[len(self.prompt.chat["messages"]) :]
        ]

    def last_reply(self) -> tuple[str, str]:
        """Return the thought of the model's last turn, and what it said after it.

        The rule is that of graders (`rewards/answers/final_text.py`).
        """
        turns = self.turns()
        text, begun = turns[-1]["content"], begins_in_thought(self.prompt.text, turns)
        thought, said = split_thought(text, begun)
        if said == text:
            return "", said
        return thought.strip().removeprefix(THINKING).strip(), said.lstrip()

    async def _follow_template(self, engine: EpisodeEngine) -> None:
        """Observe what the template adds after the last turn, or begin another transcript."""
        chat = self.prompt.chat
        text = await engine.render(self.messages, chat.get("tools"), chat.get("template_kwargs"))
        if text.startswith(self._text):
            self.transcripts[-1].observe(await engine.encode(text[len(self._text) :]))
        else:
            self.transcripts.append(Transcript(self.prompt, await engine.encode(text)))
            self._num_messages.append(0)
        self._text = text
