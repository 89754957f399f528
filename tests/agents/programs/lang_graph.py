"""langgraph: the ready-made agent with one tool, over chat completions."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

base_url, _, key, _ = sys.argv[1:]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model="m", base_url=base_url, api_key=key)
agent = create_react_agent(model, [add])
done = agent.invoke({"messages": [("user", "Add 12345 and 67890.")]})
print(done["messages"][-1].content)
