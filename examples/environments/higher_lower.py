"""An environment of one's own: the policy guesses a number from 1 to 7, and hears how it errs."""

from __future__ import annotations

import numpy as np

from spmd_rl import Prompt
from spmd_rl.environments.environment import AgentReply, Observation, TextEnvironment

NUMBERS = tuple("1234567")


class HigherLower(TextEnvironment):
    """Three guesses find each number for sure, if each of them halves what is left."""

    def __init__(self, num_guesses: int = 3) -> None:
        self.left = num_guesses

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        self.number = int(prompt.answer)
        return Observation()

    async def step(self, reply: AgentReply) -> Observation:
        self.left -= 1
        guess = reply.text.strip()
        if guess not in NUMBERS:
            return Observation(done=True, reward=-0.5)
        if int(guess) == self.number:
            return Observation(done=True, reward=1.0)
        said = "higher" if int(guess) < self.number else "lower"
        message = {"role": "user", "content": said}
        return Observation((message,), done=self.left == 0)
