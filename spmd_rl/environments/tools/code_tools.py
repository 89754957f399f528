"""CodeTools: an environment in which the policy writes code, sees what it prints, and answers."""

from __future__ import annotations

import re

import numpy as np

from spmd_rl.environments.environment import AgentReply, Observation, TextEnvironment
from spmd_rl.environments.tools.sandbox_tools import TOOL_LIMITS, SandboxTools
from spmd_rl.types.prompts import Prompt

_BLOCK = re.compile(r"```(python|sh|bash)\n(.*?)```", re.DOTALL)


class CodeTools(TextEnvironment):
    """A Python interpreter and a shell for an episode, which ends with a reply without code.

    A reply's last block of code that is fenced as ```python, ```sh or ```bash is run, and what it
    prints is the next message, of the role `role`. A reply that a limit has cut off ends the
    episode. The environment gives no reward: a grader reads the last reply.
    """

    def __init__(
        self,
        call_s: float = 10.0,
        max_characters: int = 4000,
        role: str = "user",
    ) -> None:
        self._role = role
        self._tools = SandboxTools(TOOL_LIMITS, call_s, max_characters)

    async def reset(self, prompt: Prompt, rng: np.random.Generator) -> Observation:
        return Observation()

    async def step(self, reply: AgentReply) -> Observation:
        blocks = _BLOCK.findall(reply.text)
        if not blocks or reply.status != "completed":
            return Observation(done=True)
        language, code = blocks[-1]
        run = self._tools.python if language == "python" else self._tools.shell
        return Observation(({"role": self._role, "content": await run(code)},))

    async def close(self) -> None:
        await self._tools.close()
