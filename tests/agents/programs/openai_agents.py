"""openai-agents: an agent with one tool, over Responses or over chat completions."""

import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

base_url, _, key, way = sys.argv[1:]
set_tracing_disabled(True)  # traces go to the internet


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


wire = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[way]
model = wire(model="m", openai_client=AsyncOpenAI(base_url=base_url, api_key=key))
agent = Agent(name="adder", instructions="You add.", model=model, tools=[add])
print(Runner.run_sync(agent, "Add 12345 and 67890.").final_output)
