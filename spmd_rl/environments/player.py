"""Player of an episode: one agent's conversation with the policy, and the records of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spmd_rl.data.logs.form import message
from spmd_rl.environments.environment import AgentReply, Message, TurnRecord
from spmd_rl.hooks.child.conversation import Conversation
from spmd_rl.hooks.child.episode_engine import EpisodeEngine
from spmd_rl.hooks.transcript import Transcript
from spmd_rl.types.prompts import Prompt
from spmd_rl.types.samples import AGENT, MODEL, TURN_RECORDS, Sample


class Player:
    """One agent of an episode. Its turns are drawn in a conversation of its own.

    `messages` are all that it has seen and said. What follows a thought is said; the thought itself
    is the message's "reasoning_content".
    """

    def __init__(self, agent: str, conversation: Conversation) -> None:
        self.agent = agent
        self.reward = 0.0  # of its turns so far
        self._conversation = conversation
        self.messages = [dict(one) for one in conversation.messages]
        self._records: list[list[TurnRecord]] = []  # of each transcript

    def see(self, messages: Sequence[Message]) -> None:
        """Add what the environment shows."""
        self._conversation.messages.extend(dict(one) for one in messages)
        self.messages.extend(dict(one) for one in messages)

    async def reply(
        self, engine: EpisodeEngine, state: bytes, max_tokens: int | None
    ) -> tuple[AgentReply, int]:
        """Let the policy draw the agent's next turn. Return what it said, and the tokens of it.

        A turn of no tokens says that the context is full. Blocking and errors are those of
        `Conversation.complete`.
        """
        turn = await self._conversation.complete(engine, max_tokens)
        transcripts = self._conversation.transcripts
        while len(self._records) < len(transcripts):
            self._records.append([])
        if num_tokens := len(turn.tokens):
            first = len(transcripts[-1].data) - num_tokens
            self._records[-1].append(TurnRecord(self.agent, state, first, num_tokens))
        thought, said = self._conversation.last_reply()
        self.messages.append(message(MODEL, said, reasoning_content=thought))
        return AgentReply(said, turn.status, self.agent, thought), num_tokens

    def rewarded(self, reward: float) -> None:
        """Give the agent's last turn a reward."""
        self.reward += reward
        last = [records[-1] for records in self._records if records]
        if last:
            last[-1].reward += reward

    def samples(self, score: float, parts: Mapping[str, float]) -> list[Sample]:
        """Return the transcripts as samples, each with the reward of the whole conversation.

        One in which nothing was drawn is left out.
        """
        reward = self.reward + score
        named = {AGENT: self.agent} if self.agent else {}
        samples = self._conversation.samples()
        return [
            sample.replace(
                reward=reward,
                parts={"reward": reward, **parts} if parts else {},
                metadata=sample.metadata
                | named
                | {TURN_RECORDS: [record.as_data() for record in records]},
            )
            for sample, records in zip(samples, self._records, strict=True)
            if records
        ]


async def begin_conversation(
    prompt: Prompt, messages: Sequence[Message], engine: EpisodeEngine
) -> Conversation:
    """Return the conversation of an agent that sees these messages; without any, the prompt's."""
    seen = [dict(one) for one in messages]
    if not prompt.chat or not seen or seen == prompt.chat["messages"]:
        return Conversation(prompt)
    chat = {**prompt.chat, "messages": seen}
    text = await engine.render(seen, chat.get("tools"), chat.get("template_kwargs"))
    conversation = Conversation(prompt.replace(chat=chat, text=text))
    conversation.transcripts[0] = Transcript(prompt, await engine.encode(text))
    return conversation
