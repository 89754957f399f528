"""Environment: the protocol of a world that shows messages to a policy, and takes its replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

import numpy as np

from spmd_rl.hooks.transcript import TurnStatus
from spmd_rl.types.prompts import Prompt

Message = Mapping[str, Any]  # of a chat: "role", "content", perhaps "tool_calls"

STATE_BYTES = 16
END_OF_SEEDS = 1 << 31  # of worlds
# Why an episode ended: the environment said so, or a limit of `AgentConfig` or of the model's
# context was reached.
Ending = Literal["done", "turns", "tokens", "context"]


@dataclass(frozen=True)
class Observation:
    """What an environment shows to the agent whose turn is next.

    `messages` are new messages. An agent's first ones are all that it sees, in place of the
    prompt's; without any, it sees the prompt's. `reward` is for the reply that led here, or for
    each agent by its name. `state` names the state of the world, by which turns from equal states
    can be compared. `agent` names whose turn it is, where there are several.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | Mapping[str, float] = 0.0
    state: bytes = b""
    agent: str = ""


@dataclass(frozen=True)
class AgentReply:
    """What the policy said in one turn. `status` is "truncated" where a limit has cut it off.

    `text` follows the thought, and is empty where that was never closed. `thought` is empty where
    the policy has not thought.
    """

    text: str
    status: TurnStatus = "completed"
    agent: str = ""
    thought: str = ""


@dataclass(frozen=True)
class EpisodeResult:
    """An episode that has ended, for `Environment.score`.

    `messages` are all that each agent has seen and said, and `rewards` the sums of the rewards of
    their turns, by the agent's name. A thought is the "reasoning_content" of what was said.
    """

    prompt: Prompt
    messages: dict[str, list[dict[str, Any]]]
    rewards: dict[str, float]
    num_turns: int
    ending: Ending


class Environment(Protocol):
    """One world of one episode: each has an object of its own, which is used once.

    The calls come one after the other. What they raise fails the sample, as an `EpisodeFailure` of
    the kind "environment" unless they raise one of another kind.
    """

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        """Begin, and return what the first agent sees.

        `rng` is equal for all samples of a prompt, so that they can begin alike.
        """

    async def step(self, reply: AgentReply) -> Observation:
        """Take a reply, and return what the next agent sees, or an observation that is done."""

    async def score(self, episode: EpisodeResult) -> float | dict[str, float]:
        """Return what is added to the rewards of the turns, once the episode has ended.

        A dict has the key "reward"; its other values are parts of the reward.
        """

    async def close(self) -> None:
        """Let go of what the environment holds. It is always called, and once."""


class TextEnvironment:
    """A base of environments: it scores nothing beyond the turns, and holds nothing."""

    async def score(self, episode: EpisodeResult) -> float | dict[str, float]:
        return 0.0

    async def close(self) -> None:
        pass


def state_after(past: bytes, text: str) -> bytes:
    """Return a state that stands for all that was said: a digest of an earlier one and a text."""
    data = past + text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=STATE_BYTES).digest()


@dataclass
class TurnRecord:
    """What is known of one turn, for credit by turn.

    `first_token` and `num_tokens` say which tokens of its sample the turn has drawn. `state` is
    that of the world before the turn.
    """

    agent: str
    state: bytes
    first_token: int
    num_tokens: int
    reward: float = 0.0

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data; the state is written in hexadecimal digits."""
        return {
            "agent": self.agent,
            "state": self.state.hex(),
            "reward": self.reward,
            "first_token": self.first_token,
            "num_tokens": self.num_tokens,
        }
