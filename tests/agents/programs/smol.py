"""smolagents: an agent that calls tools, and writes its own turns anew."""

import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

base_url, _, key, _ = sys.argv[1:]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIServerModel("m", api_base=base_url, api_key=key, tool_choice="auto")
agent = ToolCallingAgent(tools=[add], model=model, verbosity_level=0)
print(agent.run("Add 12345 and 67890."))
