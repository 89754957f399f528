"""Harness of verifiers that chats in the process of the episode, without a program of its own.

verifiers' own chat harness starts a Python process for every turn of a user, which takes seconds of
processor time. Source: verifiers 0.4.0, `verifiers.v1.harness`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.clients.base import build_async_httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcessHarness"]

NO_KEY = "SPMD_RL_NO_KEY"  # a variable that is not set: the header has the key
MAX_TOLD = 2000  # characters of an answer that is no success


class InProcessHarnessConfig(HarnessConfig):  # type: ignore[misc]  # a class of verifiers
    """It has no settings of its own."""


class InProcessHarness(Harness[InProcessHarnessConfig]):  # type: ignore[misc]
    """Asks for one reply to the messages so far. Tools of MCP servers are not offered."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _client: ClassVar[Any] = None  # of all episodes of the process

    @classmethod
    async def close(cls) -> None:
        """Close the connections of all episodes. They belong to one event loop."""
        if cls._client is not None:
            await cls._client.aclose()
            cls._client = None

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **others: Any,
    ) -> Any:
        """Return the reply, as what a program has printed."""
        if InProcessHarness._client is None:
            config = EvalClientConfig(base_url=endpoint, api_key_var=NO_KEY)
            InProcessHarness._client = build_async_httpx(config)
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(one) for one in prompt or []]
        answer = await InProcessHarness._client.post(
            f"{endpoint}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        if not answer.is_success:
            return ProgramResult(exit_code=1, stdout="", stderr=answer.text[-MAX_TOLD:])
        said = answer.json()["choices"][0]["message"].get("content") or ""
        return ProgramResult(exit_code=0, stdout=said, stderr="")
